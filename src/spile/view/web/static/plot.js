// Plots as SVG: axes with units, a sentence on how to read each, values on hover and by arrow keys, SVG and PNG files.
import { h, s, number } from "./dom.js";
import { download } from "./api.js";

const tip = document.getElementById("tip");
export function showTip(text, x, y) {
  tip.textContent = text; tip.hidden = false;
  tip.style.left = `${Math.min(x + 12, innerWidth - tip.offsetWidth - 6)}px`;
  tip.style.top = `${y + 16 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 8 : y + 16}px`;
}
export function hideTip() { tip.hidden = true; }

const STOPS = [[68, 50, 120], [49, 104, 142], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const SIGNED = [[33, 102, 172], [146, 197, 222], [247, 247, 247], [244, 165, 130], [178, 24, 43]];

/* Behind text: from the colour of the page to orange, and to blue for negative values. */
function textStops(signed) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue("--card").trim(), paper = [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
  return signed ? [[70, 130, 220], paper, [242, 120, 30]] : [paper, [242, 120, 30]];
}

/* A scale maps values to colours. Signed scales are symmetric about 0; others go from the lowest to the highest value. */
export function colourScale(values, { signed = false, log = false, low, high, text = false } = {}) {
  const known = values.filter(Number.isFinite), size = known.map(Math.abs).sort((a, b) => a - b);
  const top = size.length ? size[Math.min(size.length - 1, Math.floor(size.length * 0.99))] || size.at(-1) : 1;
  const least = signed ? -(high ?? top) : low ?? (known.length ? known.reduce((a, b) => Math.min(a, b)) : 0);
  const most = high ?? (signed ? top : log ? size.at(-1) ?? 1 : top);
  const bend = log ? value => Math.log(Math.max(value, 1e-30)) : value => value;
  const a = bend(log ? Math.max(least, most * 1e-6, 1e-30) : least), b = bend(most), spread = b - a || 1, stops = text ? textStops(signed) : signed ? SIGNED : STOPS;
  const at = part => {
    const place = Math.min(1, Math.max(0, part)) * (stops.length - 1), first = Math.min(stops.length - 2, Math.floor(place));
    return stops[first].map((each, n) => Math.round(each + (stops[first + 1][n] - each) * (place - first)));
  };
  const rgb = value => Number.isFinite(value) ? at((bend(value) - a) / spread) : [128, 128, 128];
  return { rgb, at, least: log ? Math.exp(a) : least, most };
}

/* Whether white text has more contrast than black text, by the relative luminance of WCAG. */
export function isDark(rgb) {
  const [r, g, b] = rgb.map(each => { const part = each / 255; return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.179;
}

export function scaleBar(scale, unit) {
  const canvas = h("canvas", { width: 160, height: 1, role: "img", "aria-label": `colours from ${number(scale.least)} to ${number(scale.most)}` }), pen = canvas.getContext("2d");
  for (let x = 0; x < 160; x += 1) { pen.fillStyle = `rgb(${scale.at(x / 159)})`; pen.fillRect(x, 0, 1, 1); }
  return h("div", { class: "scale" }, number(scale.least, 3), canvas, `${number(scale.most, 3)}${unit ? ` ${unit}` : ""}`);
}

/* A figure: title, sentence, plot, buttons for files. draw(width) returns an SVG element and is called for each width. */
export function figure(title, read, draw, { label = title, extra = [] } = {}) {
  const plot = h("div", { class: "plot" });
  let current = null, width = 0;
  function redraw() {
    width = plot.clientWidth || 640;
    current = draw(width);
    current.setAttribute("role", "img"); current.setAttribute("aria-label", label);
    plot.replaceChildren(current);
  }
  const watcher = new ResizeObserver(() => { if (Math.abs(plot.clientWidth - width) > 2) redraw(); });
  watcher.observe(plot);
  const file = title.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60);
  const buttons = h("span", {},
    h("button", { type: "button", class: "small", "aria-label": `Save ${title} as SVG`, onclick: () => download(`${file}.svg`, new Blob([standalone(current)], { type: "image/svg+xml" })) }, "SVG"), " ",
    h("button", { type: "button", class: "small", "aria-label": `Save ${title} as PNG`, onclick: () => savePng(current, `${file}.png`) }, "PNG"));
  const node = h("figure", { class: "card" }, h("div", { class: "fig-head" }, h("h2", {}, title), buttons), h("p", { class: "read" }, read), plot, ...extra);
  return { node, redraw };
}

/* The SVG with the colours and fonts that the style sheet gives it, so that it looks the same outside of the page. */
function standalone(svg) {
  const copy = svg.cloneNode(true), mine = svg.querySelectorAll("*"), theirs = copy.querySelectorAll("*");
  mine.forEach((each, n) => {
    const style = getComputedStyle(each);
    for (const name of ["fill", "stroke", "font-size", "font-family"]) if (each.tagName !== "image" && each.tagName !== "g") theirs[n].setAttribute(name, style.getPropertyValue(name));
  });
  const back = s("rect", { width: "100%", height: "100%", fill: getComputedStyle(document.documentElement).getPropertyValue("--card") });
  copy.prepend(back);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(copy);
}

function savePng(svg, name) {
  const picture = new Image(), factor = 2;
  picture.onload = () => {
    const canvas = h("canvas", { width: svg.width.baseVal.value * factor, height: svg.height.baseVal.value * factor });
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    canvas.toBlob(blob => download(name, blob));
  };
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(svg))}`;
}

function ticks(low, high, log, wanted = 5) {
  if (log) {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9), step = Math.max(1, Math.ceil((last - first) / wanted));
    const found = [];
    for (let power = first; power <= last; power += step) found.push(10 ** power);
    if (found.length < 2) for (const factor of [2, 5]) for (const power of [first - 1, first]) { const value = factor * 10 ** power; if (value >= low && value <= high) found.push(value); }
    return found.sort((a, b) => a - b);
  }
  const rough = (high - low) / wanted || 1, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find(each => each * power >= rough) * power;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  return found;
}

/* A frame with axes. x and y: {label, low, high, log, format, names}; returns the SVG and the functions to pixels. */
export function frame(width, height, x, y) {
  const left = 62, right = 14, top = 10, bottom = 44, wide = Math.max(60, width - left - right), high = height - top - bottom;
  const place = axis => axis.log ? value => (Math.log(Math.max(value, axis.low)) - Math.log(axis.low)) / (Math.log(axis.high) - Math.log(axis.low) || 1) : value => (value - axis.low) / (axis.high - axis.low || 1);
  const fx = place(x), fy = place(y), px = value => left + wide * fx(value), py = value => top + high * (1 - fy(value));
  const axis = s("g", { class: "axis" });
  for (const value of ticks(y.low, y.high, y.log)) {
    axis.append(s("line", { x1: left, x2: left + wide, y1: py(value), y2: py(value) }), s("text", { x: left - 7, y: py(value) + 4, "text-anchor": "end" }, (y.format || number)(value, 3)));
  }
  if (x.names) {
    const every = Math.ceil(x.names.length / Math.max(1, Math.floor(wide / 84)));
    x.names.forEach((name, n) => { if (n % every === 0) axis.append(s("text", { x: px(n), y: top + high + 17, "text-anchor": "middle" }, name)); });
  } else for (const value of ticks(x.low, x.high, x.log, Math.max(2, Math.floor(wide / 110)))) {
    axis.append(s("line", { x1: px(value), x2: px(value), y1: top + high, y2: top + high + 4 }), s("text", { x: px(value), y: top + high + 17, "text-anchor": "middle" }, (x.format || number)(value, 3)));
  }
  axis.append(s("text", { x: left + wide / 2, y: height - 6, "text-anchor": "middle", class: "title" }, x.label),
    s("text", { x: 0, y: 0, "text-anchor": "middle", class: "title", transform: `translate(13 ${top + high / 2}) rotate(-90)` }, y.label));
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, axis);
  return { svg, px, py, left, top, wide, high };
}

/* Shows the text of the nearest mark: texts[n] at the pixel (xs[n], ys[n]). */
export function hover(svg, xs, ys, texts, click) {
  const ring = s("circle", { r: 5, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5, visibility: "hidden" });
  svg.append(ring);
  const nearest = event => {
    const box = svg.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = -1, least = 900;
    for (let n = 0; n < xs.length; n += 1) { const far = (xs[n] - x) ** 2 + (ys === null ? 0 : (ys[n] - y) ** 2); if (far < least) { least = far; best = n; } }
    return best;
  };
  svg.addEventListener("pointermove", event => {
    const at = nearest(event);
    if (at < 0) { hideTip(); ring.setAttribute("visibility", "hidden"); return; }
    showTip(texts(at), event.clientX, event.clientY);
    if (ys !== null) { ring.setAttribute("cx", xs[at]); ring.setAttribute("cy", ys[at]); ring.setAttribute("visibility", "visible"); }
  });
  svg.addEventListener("pointerleave", () => { hideTip(); ring.setAttribute("visibility", "hidden"); });
  if (click) svg.addEventListener("click", event => { const at = nearest(event); if (at >= 0) click(at); });
}

/* A matrix of colours with names of rows and columns. The cells are one picture with a pixel for each. */
export function matrix({ title, read, rows, columns, values, scale, unit, columnLabel, rowLabel, cell, pick, square = false }) {
  const readout = h("p", { class: "readout", "aria-live": "polite" }, "Point at a cell, or focus the plot and use the arrow keys.");
  let at = [0, 0], mark = null, frameOf = null;
  const made = figure(title, read, width => {
    const left = Math.min(150, 16 + 7 * Math.max(4, ...rows.map(each => each.length))), wide = Math.max(60, Math.min(width - left - 8, columns.length * (square ? 46 : 30)));
    const size = square ? wide / Math.max(1, columns.length) : Math.max(9, Math.min(20, 380 / Math.max(1, rows.length)));
    const high = size * rows.length, step = wide / Math.max(1, columns.length), bottom = 46;
    const canvas = h("canvas", { width: Math.max(1, columns.length), height: Math.max(1, rows.length) }), pen = canvas.getContext("2d"), data = pen.createImageData(canvas.width, canvas.height);
    values.forEach((line, r) => line.forEach((value, c) => data.data.set([...scale.rgb(value), 255], 4 * (r * canvas.width + c))));
    pen.putImageData(data, 0, 0);
    const svg = s("svg", { width, height: high + bottom + 14, viewBox: `0 0 ${width} ${high + bottom + 14}` });
    const picture = s("image", { x: left, y: 12, width: wide, height: high, preserveAspectRatio: "none", href: canvas.toDataURL() });
    picture.style.imageRendering = "pixelated";
    const axis = s("g", { class: "axis" }), every = Math.max(1, Math.ceil(12 / size));
    rows.forEach((name, r) => { if (r % every === 0) axis.append(s("text", { x: left - 6, y: 12 + size * (r + 0.5) + 4, "text-anchor": "end" }, name)); });
    const skip = Math.max(1, Math.ceil((7 * Math.max(1, ...columns.map(each => each.length)) + 8) / step));
    columns.forEach((name, c) => { if (c % skip === 0) axis.append(s("text", { x: left + step * (c + 0.5), y: high + 27, "text-anchor": "middle" }, name)); });
    axis.append(s("text", { x: left + wide / 2, y: high + bottom + 4, "text-anchor": "middle", class: "title" }, columnLabel), s("text", { x: left - 6, y: 6, "text-anchor": "end", class: "title" }, rowLabel));
    mark = s("rect", { fill: "none", stroke: "var(--ink)", "stroke-width": 2, visibility: "hidden" });
    svg.append(picture, axis, mark);
    frameOf = { left, step, size };
    const find = event => { const box = svg.getBoundingClientRect(); return [Math.floor((event.clientY - box.top - 12) / size), Math.floor((event.clientX - box.left - left) / step)]; };
    svg.addEventListener("pointermove", event => { const [r, c] = find(event); if (values[r]?.[c] === undefined) { hideTip(); return; } move(r, c); showTip(cell(r, c), event.clientX, event.clientY); });
    svg.addEventListener("pointerleave", hideTip);
    svg.addEventListener("click", event => { const [r, c] = find(event); if (values[r]?.[c] !== undefined) pick?.(r, c); });
    return svg;
  }, { extra: [scaleBar(scale, unit), readout] });
  function move(r, c) {
    at = [r, c];
    for (const [name, value] of Object.entries({ x: frameOf.left + c * frameOf.step, y: 12 + r * frameOf.size, width: frameOf.step, height: frameOf.size, visibility: "visible" })) mark.setAttribute(name, value);
    readout.textContent = cell(r, c);
  }
  const plot = made.node.querySelector(".plot");
  plot.tabIndex = 0; plot.setAttribute("role", "group"); plot.setAttribute("aria-label", `${title}: arrow keys read the cells`);
  plot.addEventListener("keydown", event => {
    const by = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
    if (event.key === "Enter") pick?.(...at);
    if (!by) return;
    event.preventDefault();
    move(Math.max(0, Math.min(rows.length - 1, at[0] + by[0])), Math.max(0, Math.min(columns.length - 1, at[1] + by[1])));
  });
  return made;
}
