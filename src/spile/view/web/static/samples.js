// The page of samples: search, tokens with a heat map, layer × token view, answers, and grids of ARC tasks.
import { h, count, number, select, virtualTable, visible } from "./dom.js";
import { ask } from "./api.js";
import { colourScale, hideTip, isDark, matrix, scaleBar, showTip } from "./plot.js";
import { taskGrids } from "./score.js";

export const ROLES = [[64, "answer"], [4, "system"], [16, "assistant"], [8, "user"], [1, "special"]];
export const roleName = bits => (ROLES.find(([bit]) => bits & bit) || [0, "other"])[1];
const PAGE = 100, SHOWN = 3000;

/* Tokens as text with a colour for each value. Arrow keys move; pick(n) is called for a click or Enter. */
export function tokenText(tokens, values, scale, { describe, pick, label, marked = -1, hint = true }) {
  const node = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": label });
  const readout = h("p", { class: "readout", "aria-live": "polite" }, hint ? "Point at a token, or focus the text and use the arrow keys." : "");
  let at = -1, shown = 0;
  const spans = [];
  function more() {
    const end = Math.min(tokens.length, shown + SHOWN);
    for (; shown < end; shown += 1) {
      const rgb = scale.rgb(values[shown]), n = shown;
      const span = h("span", { class: n === marked ? "mark" : undefined }, visible(tokens[n]) || "∅");
      span.style.backgroundColor = `rgb(${rgb})`; span.style.color = isDark(rgb) ? "#fff" : "#000";
      span.dataset.value = values[n];
      spans.push(span); node.append(span);
    }
  }
  function move(n) { spans[at]?.classList.remove("at"); at = n; spans[at].classList.add("at"); readout.textContent = describe(n); }
  node.addEventListener("pointermove", event => { const n = spans.indexOf(event.target); if (n < 0) { hideTip(); return; } if (n !== at) move(n); showTip(describe(n), event.clientX, event.clientY); });
  node.addEventListener("pointerleave", hideTip);
  node.addEventListener("click", event => { const n = spans.indexOf(event.target); if (n >= 0) pick?.(n); });
  node.addEventListener("keydown", event => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (event.key === "Enter" && at >= 0) pick?.(at);
    if (!by) return;
    event.preventDefault();
    move(Math.max(0, Math.min(spans.length - 1, at + by)));
    spans[at].scrollIntoView({ block: "nearest" });
  });
  more();
  const rest = tokens.length > SHOWN ? h("button", { type: "button", onclick: () => { more(); if (shown >= tokens.length) rest.remove(); } }, `Show more of ${count(tokens.length)} tokens`) : null;
  return h("div", {}, node, rest, readout);
}

export async function samplesPage(main, root, params) {
  const begin = ask("samples", { root, start: 0, count: PAGE }).catch(() => ({ rows: [], total: 0 }));
  const [facts, top] = await Promise.all([ask("dataset", { root }), begin]);
  const detail = h("div", {}), status = h("p", { class: "soft", "aria-live": "polite" });
  let list = [], total = facts.samples, searching = null;
  const fetched = new Map([[0, top.rows]]);
  const grid = virtualTable({
    label: "Samples", height: 560, rowHeight: 30,
    columns: [{ title: "Task", width: "minmax(90px,1fr)", min: 90, left: true }, { title: "Tokens", width: "60px", min: 60 }, { title: "Text", width: "minmax(110px,2fr)", min: 110, left: true }],
    row: n => { const row = get(n); return row && [row[2], count(row[3]), row[4].replace(/\s+/g, " ")]; },
    open: n => {
      const row = get(n);
      if (!row) return;
      history.pushState(null, "", `#/samples/${root}/${row[0]}/${row[1]}`);  // The list and its search stay.
      showSample(detail, root, row[0], row[1], facts).catch(error => detail.replaceChildren(h("p", { class: "error" }, error.message)));
    },
  });
  function get(n) {
    if (searching) return list[n];
    const page = Math.floor(n / PAGE) * PAGE;
    if (!fetched.has(page)) { fetched.set(page, null); ask("samples", { root, start: page, count: PAGE }).then(found => { fetched.set(page, found.rows); if (found.total !== total) { total = found.total; grid.resize(total); } grid.refresh(); }, fail); }
    return fetched.get(page)?.[n - page];
  }
  function fail(error) { status.textContent = error.message; status.className = "error"; }

  const find = h("input", { type: "search", placeholder: "Text, task or label", "aria-label": "Find samples" });
  const whole = h("input", { type: "checkbox" });
  const least = h("input", { type: "number", min: 0, placeholder: "any" }), most = h("input", { type: "number", min: 0, placeholder: "any" });
  const role = h("select", {}, h("option", { value: "" }, "any"), ...ROLES.map(([, name]) => h("option", { value: name }, name)));
  const field = h("input", { placeholder: facts.keep.length ? `${facts.keep[0]}=value` : "field=value", disabled: !facts.keep.length });
  const form = h("form", { class: "bar", role: "search", onsubmit: event => { event.preventDefault(); search(); } }, find, h("label", {}, whole, "search the whole text"), h("label", {}, "tokens from", least), h("label", {}, "to", most), h("label", {}, "role", role), facts.keep.length ? h("label", {}, "label", field) : null, h("button", {}, "Search"));

  async function search() {
    const query = { root, find: find.value, whole: whole.checked ? 1 : "", min: least.value, max: most.value, role: role.value, label: field.value };
    const mine = searching = query.find || query.min || query.max || query.role || query.label ? {} : null;
    status.className = "soft";
    if (!mine) { status.textContent = ""; grid.resize(total); return; }
    list = []; grid.resize(0);
    let next = 0, scanned = 0;
    try {
      while (next !== null && list.length < 1000 && searching === mine) {
        const found = await ask("samples", { ...query, next: next || "" });
        if (searching !== mine) return;
        list.push(...found.rows); scanned += found.scanned; next = found.next;
        grid.resize(list.length);
        status.textContent = `${count(list.length)} of ${count(scanned)} samples match${next === null ? "" : list.length >= 1000 ? "; the search stopped at 1,000" : " so far …"}`;
      }
    } catch (error) { fail(error); }
  }

  main.replaceChildren(h("h1", {}, facts.url), h("p", { class: "soft" }, `${facts.model}, ${count(facts.samples)} samples, ${count(facts.tokens)} tokens, rows stored as ${facts.store_dtype}`),
    h("div", { class: "cols wide-right" }, h("section", { class: "card" }, h("h2", {}, "Samples"), form, status, grid.node), detail));
  grid.resize(total);
  let first = params.path;
  if (!first.length && top.rows.length) first = top.rows[0];
  if (first.length) await showSample(detail, root, first[0], first[1], facts).catch(error => detail.replaceChildren(h("p", { class: "error" }, error.message)));
  else detail.replaceChildren(h("p", { class: "soft" }, "No sample is committed yet."));
  main.dataset.ready = "true";
}

async function showSample(detail, root, stream, index, facts) {
  const sample = await ask("sample", { root, stream, index });
  const taps = sample.taps, middle = taps[taps.length >> 1];
  const choice = { measure: "norm", tap: middle, other: taps[Math.max(0, (taps.length >> 1) - 1)], dimension: 0, token: 0 };
  const heat = h("section", { class: "card" }), layers = h("div", {}), answer = h("div", {}), grids = h("div", {});
  const kept = Object.entries(sample.kept).map(([name, value]) => `${name}: ${typeof value === "object" ? JSON.stringify(value) : value}`);
  detail.replaceChildren(h("section", { class: "card" }, h("h2", {}, sample.task_id), h("p", { class: "soft" }, `stream ${sample.stream}, sample ${sample.index}, ${count(sample.tokens.length)} tokens with rows${sample.truncated ? `, ${count(sample.truncated)} tokens cut off` : ""}`), kept.length ? h("p", {}, kept.join(", ")) : ""), answer, grids, heat, layers);
  if (sample.answer) showAnswer(answer, sample.answer);
  if (facts.grids) ask("score", { root }).then(found => { const task = found.tasks.find(each => each.id === sample.task_id); if (task) grids.replaceChildren(h("section", { class: "card task" }, h("h2", {}, "Grids"), h("p", { class: "read" }, "The examples of the task, its test input, the expected output and the answers. Wrong cells have a white frame."), ...taskGrids(task))); }, () => {});
  if (!taps.length || !sample.tokens.length) { heat.replaceChildren(h("p", { class: "soft" }, "This sample has no rows of numbers.")); return; }

  const NAMES = { norm: ["norm", "norm of the token's row"], dimension: ["value", "one dimension of the token's row"], similarity: ["cosine", "cosine similarity with the row of the marked token"], distance: ["relative distance", "distance between the rows at two taps, relative to the norm at the first"] };
  async function draw() {
    const needed = { norm: {}, dimension: { dimension: choice.dimension }, similarity: { token: choice.token }, distance: { other: choice.other } }[choice.measure];
    const menu = [select("measure", Object.entries({ norm: "norm", dimension: "one dimension", similarity: "similarity to a token", distance: "distance between taps" }), choice.measure, value => { choice.measure = value; draw(); }), select("tap", taps, choice.tap, value => { choice.tap = value; draw(); })];
    if (choice.measure === "distance") menu.push(select("and", taps, choice.other, value => { choice.other = value; draw(); }));
    if (choice.measure === "dimension") { const field = h("input", { type: "number", min: 0, value: choice.dimension, onchange: () => { choice.dimension = field.value; draw(); } }); menu.push(h("label", {}, "dimension", field)); }
    if (choice.measure === "similarity") { const field = h("input", { type: "number", min: 0, max: sample.tokens.length - 1, value: choice.token, onchange: () => { choice.token = Number(field.value); draw(); } }); menu.push(h("label", {}, "token", field)); }
    const [unit, what] = NAMES[choice.measure];
    const top = [h("h2", {}, `Tokens by ${NAMES[choice.measure][0]}`), h("p", { class: "read" }, `The colour of a token is the ${what}. ${choice.measure === "similarity" ? "Choose a token to compare with it." : "Strong colours are large values; choose a token to see which others are similar to it."}`), h("div", { class: "bar" }, ...menu)];
    try {
      const { values } = await ask("heat", { root, stream, index, measure: choice.measure, tap: choice.tap, ...needed });
      const signed = choice.measure === "dimension" || choice.measure === "similarity";
      const scale = colourScale(values, { text: true, signed, log: choice.measure === "norm", high: choice.measure === "similarity" ? 1 : undefined });
      const describe = n => `${JSON.stringify(sample.tokens[n])}  ${unit} ${number(values[n])}, position ${sample.positions[n]}, token id ${sample.ids[n]}, ${roleName(sample.roles[n])}`;
      const text = tokenText(sample.tokens, values, scale, { describe, label: "Tokens of the sample", marked: choice.measure === "similarity" ? choice.token : -1, pick: n => { choice.measure = "similarity"; choice.token = n; draw(); } });
      heat.replaceChildren(...top, text, scaleBar(scale, unit));
      heat.dataset.ready = `${choice.measure} ${choice.tap}`;
    } catch (error) { heat.replaceChildren(...top, h("p", { class: "error" }, error.message)); }
  }

  const view = { measure: "norm", first: 0 };
  async function drawLayers() {
    try {
      const found = await ask("grid", { root, stream, index, measure: view.measure, first: view.first });
      const flat = found.values.flat(), change = view.measure !== "norm", step = Math.max(1, found.values[0]?.length || 0);
      const names = (found.values[0] || []).map((_, n) => String(found.first + n));
      const picture = matrix({
        title: "Layers × tokens", rows: found.taps, columns: names, values: found.values, scale: colourScale(flat, { log: !change }), unit: change ? "relative distance" : "norm",
        read: change ? "Each cell is the distance of a token's row from its row at the tap before, relative to the norm there: bright layers change the token most." : "Each cell is the norm of one token's row at one tap, with logarithmic colours. A bright column is often an attention sink.",
        columnLabel: "Token (number of the row)", rowLabel: "Tap",
        cell: (r, c) => `${found.taps[r]}, token ${found.first + c} ${JSON.stringify(sample.tokens[found.first + c])}: ${number(found.values[r][c])}`,
        pick: (r) => { choice.tap = found.taps[r]; draw(); },
      });
      const buttons = [select("measure", [["norm", "norm"], ["change", "change from the tap before"]], view.measure, value => { view.measure = value; drawLayers(); })];
      if (view.first > 0) buttons.push(h("button", { type: "button", onclick: () => { view.first = Math.max(0, view.first - step); drawLayers(); } }, "Tokens before"));
      if (view.first + step < sample.tokens.length) buttons.push(h("button", { type: "button", onclick: () => { view.first += step; drawLayers(); } }, "Tokens after"));
      picture.node.insertBefore(h("div", { class: "bar" }, ...buttons), picture.node.querySelector(".plot"));
      layers.replaceChildren(picture.node);
      picture.redraw();
      layers.dataset.ready = view.measure;
    } catch (error) { layers.replaceChildren(h("p", { class: "error" }, error.message)); }
  }
  await draw();  // The layers read more, so they come second.
  await drawLayers();
}

function showAnswer(node, answer) {
  const scale = colourScale(answer.logprobs.map(each => -each), { low: 0, text: true });
  const surprise = answer.logprobs.map(each => -each), sum = answer.logprobs.reduce((a, b) => a + b, 0);
  node.replaceChildren(h("section", { class: "card" }, h("h2", {}, "Answer"), h("p", { class: "read" }, `What the model generated, ended by ${answer.stop_reason === "stop" ? "a stop token" : "the limit of its length"}. Coloured tokens were unlikely: the colour is the negative log-probability.`),
    tokenText(answer.tokens, surprise, scale, { label: "Tokens of the answer", describe: n => `${JSON.stringify(answer.tokens[n])}  log-probability ${number(answer.logprobs[n])}, probability ${number(100 * Math.exp(answer.logprobs[n]), 3)} %` }), scaleBar(scale, "negative log-probability (nats)"),
    h("p", { class: "soft" }, `${count(answer.tokens.length)} tokens, log-probability of the whole answer `, h("span", { "data-figure": "logprob" }, number(sum)))));
}
