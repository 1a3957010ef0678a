// Elements, number formats and the virtual table. All text goes through text nodes, so text of a dataset is never markup.

export function h(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name === "value" || name === "checked" || name === "selected") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter(each => each !== null && each !== undefined));
  return made;
}

export function s(tag, props = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const count = value => value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");

export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e6 || size < 1e-4 ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let place = 0, size = value;
  while (size >= 1000 && place < units.length - 1) { size /= 1000; place += 1; }
  return `${Number(size.toPrecision(3))} ${units[place]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const total = Math.max(0, Math.round(seconds));
  if (total < 60) return `${total} s`;
  if (total < 3600) return `${Math.floor(total / 60)} min ${total % 60 ? `${total % 60} s` : ""}`.trim();
  if (total < 86400) return `${Math.floor(total / 3600)} h ${Math.floor((total % 3600) / 60)} min`;
  return `${Math.floor(total / 86400)} d ${Math.floor((total % 86400) / 3600)} h`;
}

export function ago(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([each]) => seconds >= each) || [1, "s"];
  return `${Math.floor(Math.max(0, seconds) / size)} ${unit} ago`;
}

export const percent = value => value === null || value === undefined ? "–" : `${value.toFixed(value >= 99.95 || value === 0 ? 0 : 1)} %`;

export function clock(seconds) {
  return seconds ? new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ") : "–";
}

export const visible = text => text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");

export function table(columns, rows, label) {
  // columns: [title, class]; rows: arrays of text or elements.
  const head = h("tr", {}, ...columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title)));
  const body = rows.map(row => h("tr", { class: row.kind }, ...row.map((cell, place) => h("td", { class: columns[place][1] }, cell))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, h("table", {}, h("thead", {}, head), h("tbody", {}, ...body)));
}

export function select(label, options, chosen, change) {
  const menu = h("select", { onchange: () => change(menu.value) }, ...options.map(each => {
    const [value, text] = Array.isArray(each) ? each : [each, each];
    return h("option", { value, selected: value === chosen }, text);
  }));
  return h("label", {}, label, menu);
}

let tables = 0;

/* A table that has elements only for the rows in view. columns: {title, width, left, sort}; row(i) gives the cells of a
   row, or undefined while they are being fetched; open(i) is called for a click or Enter. */
export function virtualTable({ label, columns, height = 420, rowHeight = 30, row, open, sort }) {
  const id = `table-${tables += 1}`, layout = columns.map(each => each.width).join(" ");
  const width = `${columns.reduce((sum, each) => sum + (each.min || 70) + 11, 20)}px`;
  let total = 0, active = -1, chosen = -1, sorted = null;
  const headers = columns.map((column, place) => h("span", { role: "columnheader", class: column.left ? "left" : "" },
    sort ? h("button", { type: "button", onclick: () => order(place) }, column.title) : column.title));
  const head = h("div", { class: "head", role: "rowgroup" }, h("div", { class: "line", role: "row" }, ...headers));
  const body = h("div", { class: "body", role: "rowgroup" });
  const node = h("div", { class: "grid", role: "grid", tabindex: "0", "aria-label": label, onscroll: () => draw(), onkeydown: key }, head, body);
  head.firstChild.style.gridTemplateColumns = layout; head.firstChild.style.height = `${rowHeight}px`;
  head.style.minWidth = body.style.minWidth = width;
  const shown = new Map();

  function order(place) {
    sorted = { place, down: sorted && sorted.place === place ? !sorted.down : !columns[place].left };
    headers.forEach((each, n) => each.setAttribute("aria-sort", n !== place ? "none" : sorted.down ? "descending" : "ascending"));
    sort(place, sorted.down);
    refresh();
  }

  function draw() {
    const first = Math.max(0, Math.floor(node.scrollTop / rowHeight) - 6);
    const last = Math.min(total, Math.ceil((node.scrollTop + height) / rowHeight) + 6);
    for (const [place, line] of shown) if (place < first || place >= last) { line.remove(); shown.delete(place); }
    for (let place = first; place < last; place += 1) {
      let line = shown.get(place);
      if (!line) {
        line = h("div", { class: "line", role: "row", id: `${id}-${place}`, "aria-rowindex": place + 2, onclick: () => pick(place, true) }, ...columns.map(column => h("span", { role: "gridcell", class: column.left ? "left" : "" })));
        line.style.gridTemplateColumns = layout; line.style.height = `${rowHeight}px`; line.style.transform = `translateY(${place * rowHeight}px)`;
        shown.set(place, line); body.append(line);
        fill(line, place);
      }
    }
  }

  function fill(line, place) {
    const cells = row(place);
    line.classList.toggle("chosen", place === chosen || place === active);
    line.setAttribute("aria-selected", String(place === chosen));
    columns.forEach((column, n) => {
      const cell = cells ? cells[n] : n ? "" : "…", target = line.children[n];
      const [text, kind] = Array.isArray(cell) ? cell : [cell, ""];
      if (target.textContent !== text) { target.textContent = text; if (column.left) target.title = text; }
      const wanted = `${column.left ? "left" : ""} ${kind}`;
      if (target.className !== wanted) target.className = wanted;
    });
  }

  function pick(place, opening) {
    active = place;
    if (opening) { chosen = place; open?.(place); }
    node.setAttribute("aria-activedescendant", `${id}-${place}`);
    for (const [each, line] of shown) fill(line, each);
  }

  function key(event) {
    const page = Math.floor(height / rowHeight) - 2;
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -total, End: total };
    if (event.key === "Enter" && active >= 0) { pick(active, true); event.preventDefault(); return; }
    if (event.target !== node || !(event.key in steps) || !total) return;
    event.preventDefault();
    const place = Math.max(0, Math.min(total - 1, active + steps[event.key])), top = place * rowHeight;
    if (top < node.scrollTop) node.scrollTop = top;
    if (top + 2 * rowHeight > node.scrollTop + height) node.scrollTop = top + 2.5 * rowHeight - height;
    draw(); pick(place, false);
  }

  function refresh() { for (const [place, line] of shown) fill(line, place); draw(); }

  function resize(rows) {
    total = rows;
    body.style.height = `${rows * rowHeight}px`;
    node.style.height = `${Math.min(height, (rows + 1) * rowHeight + 18)}px`;
    node.setAttribute("aria-rowcount", rows + 1);
    for (const [place, line] of shown) if (place >= rows) { line.remove(); shown.delete(place); }
    refresh();
  }

  return { node, resize, refresh, choose(place) { chosen = place; refresh(); } };
}
