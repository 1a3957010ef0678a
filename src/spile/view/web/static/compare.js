// Two datasets side by side: how far the same rows are apart, and where.
import { h, count, number, select, table } from "./dom.js";
import { ask } from "./api.js";
import { colourScale, matrix, scaleBar } from "./plot.js";
import { tokenText } from "./samples.js";

export async function comparePage(main, root, params, go, about) {
  const other = Number(params.query.other ?? (Number(root) === 0 ? 1 : 0));
  const names = about.roots.map((each, n) => [String(n), each.url]);
  const found = await ask("compare", { root, other });
  const detail = h("div", {});
  const taps = found.taps.map(([tap, rows, median, largest, cosine]) => [tap, count(rows), number(median), number(largest), number(cosine, 5)]);
  const worst = found.by_sample.map(([far, stream, index, task, tap]) => [h("button", { type: "button", class: "link", onclick: () => show(stream, index) }, task), `${stream}/${index}`, number(far), tap]);
  main.replaceChildren(h("h1", {}, "Compare"), h("div", { class: "bar" }, select("first", names, String(root), value => go("compare", value, [], { other })), select("second", names, String(other), value => go("compare", root, [], { other: value }))),
    h("p", { class: "soft" }, `${count(found.samples)} samples with the same tokens in both datasets were compared.${found.different.length ? ` ${found.different.length} have other tokens: ${found.different.join(", ")}` : ""}`),
    h("div", { class: "cols" },
      h("section", { class: "card" }, h("h2", {}, "Distance by tap"), h("p", { class: "read" }, "The distance between the two rows of a token, relative to the norm of the first: 0 means equal, 1 as large as the row itself."), table([["Tap", "left"], ["Rows"], ["Median"], ["Largest"], ["Cosine"]], taps, "Distance by tap")),
      h("section", { class: "card" }, h("h2", {}, "Samples that differ most"), h("p", { class: "read" }, "The largest distance in each sample, and the tap where it is. Choose a sample to see its tokens."), table([["Task", "left"], ["Stream/sample"], ["Largest"], ["Tap", "left"]], worst, "Samples that differ most"))), detail);

  async function show(stream, index, tap) {
    try {
      const each = await ask("difference", { root, other, stream, index, first: 0 });
      const scale = colourScale(each.values.flat(), { low: 0 });
      const at = Math.max(0, tap ? each.taps.indexOf(tap) : each.taps.length - 1), values = each.values[at];
      const texts = each.tokens.slice(0, values.length), own = colourScale(values, { low: 0, text: true });
      const text = h("section", { class: "card" }, h("h2", {}, `${each.task_id} at ${each.taps[at]}`), h("p", { class: "read" }, "The colour of a token is the relative distance between its two rows; strongly coloured tokens differ most."), h("div", { class: "bar" }, select("tap", each.taps, each.taps[at], value => show(stream, index, value))),
        tokenText(texts, values, own, { label: "Tokens by distance", describe: n => `${JSON.stringify(texts[n])}  relative distance ${number(values[n])}` }), scaleBar(own, "relative distance"));
      const picture = matrix({ title: "Distance by layer and token", rows: each.taps, columns: values.map((_, n) => String(n)), values: each.values, scale, unit: "relative distance", columnLabel: "Token (number of the row)", rowLabel: "Tap", read: "Each cell is the relative distance of one token's rows at one tap: it shows at which layer and token the two runs part.", cell: (r, c) => `${each.taps[r]}, token ${c} ${JSON.stringify(texts[c])}: ${number(each.values[r][c])}`, pick: r => show(stream, index, each.taps[r]) });
      detail.replaceChildren(text, picture.node);
      picture.redraw();
      detail.dataset.ready = "true";
    } catch (error) { detail.replaceChildren(h("p", { class: "error" }, error.message)); }
  }
  if (found.by_sample.length) await show(found.by_sample[0][1], found.by_sample[0][2], found.by_sample[0][4]);
  main.dataset.ready = "true";
}
