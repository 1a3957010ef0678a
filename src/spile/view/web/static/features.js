// The features of a sparse autoencoder: how often each is active, and where most.
import { h, s, count, number, virtualTable } from "./dom.js";
import { ask } from "./api.js";
import { colourScale, figure, frame, hover } from "./plot.js";
import { tokenText } from "./samples.js";

export async function featuresPage(main, root, params, go) {
  main.replaceChildren(h("h1", {}, "Features"), h("p", { class: "loading" }, "Computing the features of some samples …"));
  const found = await ask("features", { root });
  const order = found.density.map((_, n) => n), detail = h("div", {});
  const alive = found.density.filter(each => each > 0), bins = new Array(40).fill(0), low = Math.log10(1 / found.rows), width = -low / bins.length || 1;
  for (const each of alive) bins[Math.min(bins.length - 1, Math.max(0, Math.floor((Math.log10(each) - low) / width)))] += 1;
  const histogram = figure("Density of the features", `How many features are active on which fraction of the ${count(found.rows)} rows. Features at the right are active almost everywhere; ${count(found.density.length - alive.length)} of ${count(found.density.length)} were never active here.`, wide => {
    const f = frame(wide, 240, { label: "Fraction of rows on which a feature is active", low: 10 ** low, high: 1, log: true }, { label: "Features", low: 0, high: Math.max(...bins) * 1.1 || 1, format: value => count(value) });
    const edge = n => 10 ** (low + n * width);
    bins.forEach((size, n) => { if (size) f.svg.append(s("rect", { x: f.px(edge(n)) + 0.5, y: f.py(size), width: Math.max(1, f.px(edge(n + 1)) - f.px(edge(n)) - 1), height: f.py(0) - f.py(size), fill: "var(--series-1)" })); });
    hover(f.svg, bins.map((_, n) => (f.px(edge(n)) + f.px(edge(n + 1))) / 2), null, n => `${count(bins[n])} features with a density from ${number(edge(n), 3)} to ${number(edge(n + 1), 3)}`);
    return f.svg;
  });
  const grid = virtualTable({ label: "Features", height: 420, columns: [{ title: "Feature", width: "1fr" }, { title: "Density", width: "1fr" }, { title: "Largest", width: "1fr" }], row: n => [String(order[n]), number(found.density[order[n]], 3), number(found.largest[order[n]])], open: n => { history.pushState(null, "", `#/features/${root}/${order[n]}`); show(order[n]).catch(fail); }, sort: (column, down) => { const key = [n => n, n => found.density[n], n => found.largest[n]][column]; order.sort((a, b) => (key(a) - key(b)) * (down ? -1 : 1)); } });
  order.sort((a, b) => found.largest[b] - found.largest[a]);
  const search = h("input", { type: "number", min: 0, max: found.density.length - 1, "aria-label": "Number of a feature", placeholder: "Number" });
  const form = h("form", { class: "bar", onsubmit: event => { event.preventDefault(); if (search.value) go("features", root, [search.value], {}); } }, search, h("button", {}, "Show feature"));
  main.replaceChildren(h("h1", {}, `Features of ${found.name}`), h("p", { class: "soft" }, `At ${found.tap}, on ${count(found.rows)} rows of ${count(found.samples)} samples that are spread over the dataset.`),
    h("div", { class: "cols" }, histogram.node, h("section", { class: "card" }, h("h2", {}, "All features"), h("p", { class: "read" }, "The fraction of rows on which each feature is active, and its largest activation. Choose one to see where it is active."), form, grid.node)), detail);
  detail.style.marginTop = "1rem";
  grid.resize(order.length); histogram.redraw();
  const chosen = Number(params.path[0] ?? order[0]);
  if (order.length) await show(chosen).catch(fail);
  main.dataset.ready = "true";

  function fail(error) { detail.replaceChildren(h("p", { class: "error" }, error.message)); }

  async function show(feature) {
    const each = await ask("feature", { root, feature });
    const high = Math.max(1e-9, ...each.samples.map(one => one.value));
    detail.replaceChildren(h("section", { class: "card" }, h("h2", {}, `Feature ${each.feature}`), h("p", { class: "read" }, `The samples in which it is most active, at most one place of each, with the tokens around it. It is active on ${number(100 * each.density, 3)} % of the rows; strong colours are large activations.`),
      h("div", { class: "contexts" }, ...(each.samples.length ? each.samples.map(one => h("div", {}, h("h3", {}, h("button", { type: "button", class: "link", onclick: () => go("samples", root, [one.stream, one.index], {}) }, one.task_id), ` token ${one.row}: `, h("span", { "data-figure": "activation" }, number(one.value))),
        tokenText(one.tokens, one.values, colourScale(one.values, { low: 0, high, text: true }), { label: `Tokens around ${one.row}`, marked: one.row - one.first, hint: false, describe: n => `${JSON.stringify(one.tokens[n])}  activation ${number(one.values[n])}` }))) : [h("p", { class: "soft" }, "It was active on none of these rows.")]))));
    detail.dataset.ready = String(feature);
  }
}
