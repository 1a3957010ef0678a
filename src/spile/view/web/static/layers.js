// The page of layers: norms by layer, distribution, dimensions, sinks, main directions, cosine between layers.
import { h, s, count, number, select, table } from "./dom.js";
import { ask } from "./api.js";
import { colourScale, figure, frame, hover, matrix } from "./plot.js";
import { roleName } from "./samples.js";

const SERIES = ["var(--series-1)", "var(--series-2)", "var(--series-3)", "var(--series-4)", "var(--series-5)", "var(--series-6)"];

export async function layersPage(main, root, params, go) {
  const found = await ask("layers", { root });
  if (!found.taps.length) { main.replaceChildren(h("h1", {}, "Layers"), h("p", { class: "soft" }, "No sample is committed yet.")); main.dataset.ready = "true"; return; }
  const taps = found.taps.map(each => each.tap), tap = taps.includes(params.query.tap) ? params.query.tap : taps[taps.length >> 1];
  const one = h("div", {}), space = h("div", {}), cosine = h("div", {});
  const choose = name => go("layers", root, [], { tap: name });
  const partly = found.taps.some(each => !each.complete);

  const norms = figure("Norms by layer", `The norms of the rows at each tap, on a logarithmic axis: the line is the median, the dark band 25 % to 75 %, the light band 1 % to 99 %, the dot the largest row.${partly ? " Some taps have no stored statistics: theirs are from random rows." : ""}`, width => {
    const all = found.taps.flatMap(each => [...each.quantiles, each.largest]).filter(each => each > 0);
    const f = frame(width, 300, { label: "Tap", low: -0.5, high: taps.length - 0.5, names: taps }, { label: "Norm of a row", low: Math.min(...all) * 0.9, high: Math.max(...all) * 1.15, log: true });
    const band = (low, high, opacity) => {
      if (taps.length === 1) { const [a, b] = [found.taps[0].quantiles[low], found.taps[0].quantiles[high]]; return s("rect", { x: f.px(-0.2), y: f.py(b), width: f.px(0.2) - f.px(-0.2), height: f.py(a) - f.py(b), fill: "var(--series-1)", opacity }); }
      const up = found.taps.map((each, n) => `${f.px(n)},${f.py(each.quantiles[high])}`), down = found.taps.map((each, n) => `${f.px(n)},${f.py(each.quantiles[low])}`).reverse();
      return s("path", { d: `M${[...up, ...down].join("L")}Z`, fill: "var(--series-1)", opacity });
    };
    const xs = found.taps.map((_, n) => f.px(n)), ys = found.taps.map(each => f.py(each.quantiles[2]));
    f.svg.append(band(0, 4, 0.16), band(1, 3, 0.28), s("path", { d: `M${xs.map((x, n) => `${x},${ys[n]}`).join("L")}`, fill: "none", stroke: "var(--series-1)", "stroke-width": 2 }));
    found.taps.forEach((each, n) => { f.svg.append(s("circle", { cx: xs[n], cy: ys[n], r: each.tap === tap ? 5 : 3, fill: "var(--series-1)" })); if (each.largest > 0) f.svg.append(s("circle", { cx: xs[n], cy: f.py(each.largest), r: 2.5, fill: "var(--series-2)" })); });
    hover(f.svg, xs, null, n => { const each = found.taps[n]; return `${each.tap}: median ${number(each.quantiles[2])}, 1 % to 99 %: ${number(each.quantiles[0])} to ${number(each.quantiles[4])}, largest ${number(each.largest)}`; }, n => choose(taps[n]));
    return f.svg;
  });
  const rows = found.taps.map(each => Object.assign([h("button", { type: "button", class: "link", onclick: () => choose(each.tap) }, each.tap), count(each.rows), number(each.quantiles[2]), number(each.quantiles[4]), number(each.largest), count(each.sinks)], { kind: each.tap === tap ? "chosen" : undefined }));
  const list = h("section", { class: "card" }, h("h2", {}, "Taps"), h("p", { class: "read" }, "The same numbers as a table. A sink is a row with more than ten times the median norm. Choose a tap to see it below."), table([["Tap", "left"], ["Rows"], ["Median norm"], ["99 %"], ["Largest"], ["Sinks"]], rows, "Taps"));
  main.replaceChildren(h("h1", {}, "Layers"), h("div", { class: "cols" }, norms.node, list), h("div", { class: "bar" }, select("Tap", taps, tap, choose)), one, space, cosine);
  norms.redraw();
  const parts = [showTap(one, root, tap, go), showSpace(space, root, tap, go), showCosine(cosine, root)];
  await Promise.all(parts.map((part, n) => part.catch(error => [one, space, cosine][n].replaceChildren(h("p", { class: "error" }, error.message)))));
  main.dataset.ready = "true";
}

async function showTap(node, root, tap, go) {
  const found = await ask("tap", { root, tap });
  const bins = found.bins.filter(([, high]) => high > 0), most = Math.max(1, ...bins.map(each => each[2]));
  const shape = figure(`Distribution of norms at ${tap}`, `How many of the ${count(found.rows)} rows have a norm in each bin; both axes are logarithmic. Rows to the right of the dashed line, ten times the median, are sinks.`, width => {
    const low = Math.max(bins[0]?.[0] || 0.1, 1e-30), high = Math.max(bins.at(-1)?.[1] || 1, low * 1.5, found.sinks ? found.sink_norm * 1.1 : 0);
    const f = frame(width, 240, { label: "Norm of a row", low: low * 0.95, high: high * 1.05, log: true }, { label: "Rows", low: 0.7, high: most * 1.3, log: true, format: value => count(value) });
    for (const [a, b, rows] of bins) f.svg.append(s("rect", { x: f.px(a), y: f.py(rows), width: Math.max(1, f.px(b) - f.px(a) - 0.6), height: Math.max(0, f.py(0.7) - f.py(rows)), fill: "var(--series-1)" }));
    if (found.sink_norm <= high) f.svg.append(s("line", { x1: f.px(found.sink_norm), x2: f.px(found.sink_norm), y1: f.top, y2: f.top + f.high, stroke: "var(--series-2)", "stroke-dasharray": "5 4", "stroke-width": 1.5 }));
    hover(f.svg, bins.map(([a, b]) => (f.px(a) + f.px(b)) / 2), null, n => `${count(bins[n][2])} rows from ${number(bins[n][0])} to ${number(bins[n][1])}`);
    return f.svg;
  });
  const outliers = new Set(found.outliers), positive = found.size.filter(each => each > 0);
  const dims = figure(`Dimensions at ${tap}`, `The root mean square of each dimension, on a logarithmic axis, over ${count(found.dimension_rows)} rows. Outliers, in the second colour, are more than six times the median; dead dimensions do not vary.`, width => {
    const f = frame(width, 240, { label: "Dimension", low: 0, high: Math.max(1, found.size.length - 1) }, { label: "Root mean square", low: Math.min(...positive) * 0.9 || 0.1, high: Math.max(...positive) * 1.2 || 1, log: true });
    const point = n => `M${f.px(n).toFixed(1)},${f.py(found.size[n]).toFixed(1)}h0`;
    const path = (chosen, colour, width) => s("path", { d: found.size.map((_, n) => n).filter(chosen).map(point).join(""), stroke: colour, "stroke-width": width, "stroke-linecap": "round", fill: "none" });
    f.svg.append(path(n => !outliers.has(n) && found.size[n] > 0, "var(--series-1)", 3), path(n => outliers.has(n), "var(--series-2)", 6));
    hover(f.svg, found.size.map((_, n) => f.px(n)), found.size.map(each => f.py(Math.max(each, 1e-30))), n => `dimension ${n}: root mean square ${number(found.size[n])}, mean ${number(found.mean[n])}`);
    return f.svg;
  }, { extra: [h("p", {}, `${count(found.outliers.length)} outlier dimensions${found.outliers.length ? `: ${found.outliers.slice(0, 12).join(", ")}${found.outliers.length > 12 ? " …" : ""}` : ""}. ${count(found.dead.length)} dead dimensions${found.dead.length ? `: ${found.dead.slice(0, 12).join(", ")}${found.dead.length > 12 ? " …" : ""}` : ""}.`)] });
  const sinks = found.top.map(([norm, text, stream, sample, position]) => [h("span", { class: "mono" }, JSON.stringify(text)), number(norm), number(norm / found.median, 3), count(position), h("button", { type: "button", class: "link", onclick: () => go("samples", root, [stream, sample], {}) }, `${stream}/${sample}`)]);
  const list = h("section", { class: "card" }, h("h2", {}, `Largest rows at ${tap}`), h("p", { class: "read" }, `The rows with the largest norms. ${count(found.sinks)} rows are sinks: more than ten times the median, ${number(found.median)}.`), table([["Token", "left"], ["Norm"], ["× median"], ["Position"], ["Stream/sample"]], sinks, "Largest rows"));
  node.replaceChildren(h("div", { class: "cols" }, shape.node, dims.node), list);
  list.style.marginTop = "1rem";
  shape.redraw(); dims.redraw();
}

async function showSpace(node, root, tap, go) {
  const found = await ask("space", { root, tap });
  const fields = ["role", ...Object.keys(found.kept)];
  let field = "role";
  const legend = h("p", { class: "legend" });
  const xs = found.points.map(each => each[0]), ys = found.points.map(each => each[1]);
  function groups() {
    const values = field === "role" ? found.roles.map(roleName) : found.kept[field].map(String), sizes = new Map();
    for (const each of values) sizes.set(each, (sizes.get(each) || 0) + 1);
    const names = [...sizes].sort((a, b) => b[1] - a[1]).map(each => each[0]);
    return { values, names: names.slice(0, SERIES.length - (names.length > SERIES.length ? 1 : 0)), many: names.length > SERIES.length };
  }
  const picture = figure(`Main directions of ${tap}`, `Each dot is one of ${count(xs.length)} rows of random samples, on the two directions with the largest variance (${found.explained.map(each => `${(100 * each).toFixed(0)} %`).join(" and ")} of it). Dots of one colour that lie together are separated by this layer.`, width => {
    const { values, names, many } = groups(), pad = (low, high) => [low - (high - low || 1) * 0.05, high + (high - low || 1) * 0.05];
    const [x0, x1] = pad(Math.min(...xs), Math.max(...xs)), [y0, y1] = pad(Math.min(...ys), Math.max(...ys));
    const f = frame(width, 380, { label: "First direction (relative units)", low: x0, high: x1 }, { label: "Second direction (relative units)", low: y0, high: y1 });
    [...names, null].forEach((name, group) => {
      const mine = values.map((_, n) => n).filter(n => name === null ? !names.includes(values[n]) : values[n] === name);
      if (mine.length) f.svg.append(s("path", { d: mine.map(n => `M${f.px(xs[n]).toFixed(1)},${f.py(ys[n]).toFixed(1)}h0`).join(""), stroke: name === null ? "var(--soft)" : SERIES[group], "stroke-width": 5, "stroke-linecap": "round", opacity: 0.6, fill: "none" }));
    });
    hover(f.svg, xs.map(f.px), ys.map(f.py), n => `${JSON.stringify(found.tokens[n])}, ${field}: ${values[n]}, stream ${found.streams[n]}, sample ${found.samples[n]}`, n => go("samples", root, [found.streams[n], found.samples[n]], {}));
    legend.replaceChildren(...names.map((name, group) => { const dot = h("i", {}); dot.style.background = SERIES[group]; return h("span", {}, dot, name); }), ...(many ? [h("span", {}, "grey: all others")] : []));
    return f.svg;
  }, { extra: [legend] });
  if (fields.length > 1) picture.node.insertBefore(h("div", { class: "bar" }, select("Colour by", fields, field, value => { field = value; picture.redraw(); })), picture.node.querySelector(".plot"));
  node.replaceChildren(picture.node);
  node.style.marginTop = "1rem";
  picture.redraw();
}

async function showCosine(node, root) {
  const found = await ask("cosine", { root });
  const picture = matrix({
    title: "Cosine similarity between layers", rows: found.taps, columns: found.taps, values: found.values, scale: colourScale(found.values.flat(), { signed: true, high: 1 }), unit: "cosine", square: true,
    read: `The mean cosine similarity of the same token's rows at two taps, over ${count(found.rows)} rows: 1 (red) means the same direction, 0 (white) unrelated, −1 (blue) opposite.`,
    columnLabel: "Tap", rowLabel: "Tap", cell: (r, c) => `${found.taps[r]} and ${found.taps[c]}: ${number(found.values[r][c])}`,
  });
  node.replaceChildren(picture.node);
  picture.redraw();
}
