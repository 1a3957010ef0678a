// The page of scores of ARC tasks: examples, expected outputs and answers as grids; wrong cells have a frame.
import { h, count } from "./dom.js";
import { ask } from "./api.js";

const COLOURS = ["#111", "#1e93ff", "#f93c31", "#4fcc30", "#ffdc00", "#999", "#e53aa3", "#ff851b", "#87d8f1", "#921231"];

function gridCanvas(grid, other) {
  const rows = grid.length, columns = grid[0].length, cell = Math.max(4, Math.min(18, Math.floor(180 / Math.max(rows, columns))));
  const canvas = h("canvas", { width: columns * cell + 1, height: rows * cell + 1, role: "img", "aria-label": `${rows} rows, ${columns} columns: ${grid.map(row => row.join("")).join(" ")}` });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#555"; pen.fillRect(0, 0, canvas.width, canvas.height);
  const same = other && other.length === rows && other[0].length === columns;
  let wrong = same ? 0 : null;
  grid.forEach((row, r) => row.forEach((colour, c) => {
    pen.fillStyle = COLOURS[colour]; pen.fillRect(c * cell + 1, r * cell + 1, cell - 1, cell - 1);
    if (same && other[r][c] !== colour) { wrong += 1; pen.strokeStyle = "#fff"; pen.lineWidth = 2; pen.strokeRect(c * cell + 2, r * cell + 2, cell - 3, cell - 3); }
  }));
  canvas.dataset.wrong = wrong;
  return [canvas, wrong];
}

function gridFigure(title, grid, other, state) {
  const [canvas, wrong] = gridCanvas(grid, other);
  const note = state === "wrong" ? wrong === null ? ", another size" : `, ${count(wrong)} wrong cells` : "";
  return h("figure", {}, canvas, h("figcaption", { class: state }, title + note));
}

export function taskGrids(task) {
  const examples = h("div", { class: "grids" }), answers = h("div", { class: "grids" });
  task.train.forEach((pair, n) => examples.append(h("div", { class: "pair" }, gridFigure(`example ${n + 1}`, pair.input), gridFigure("→", pair.output))));
  if (task.test) examples.append(gridFigure("test", task.test));
  if (task.expected) answers.append(gridFigure("expected", task.expected));
  task.attempts.forEach((grid, n) => answers.append(gridFigure(`attempt ${n + 1}, ${task.votes[n]} votes`, grid, task.expected, task.expected ? (JSON.stringify(task.expected) === JSON.stringify(grid) ? "right" : "wrong") : undefined)));
  if (!task.attempts.length) answers.append(h("p", { class: "soft" }, "no grid could be read"));
  return [examples, answers];
}

export async function scorePage(main, root) {
  const { summary, tasks } = await ask("score", { root });
  const part = summary.scored ? ` (${(100 * summary.score).toFixed(1)} %), ${summary.right_in_two} within two attempts` : "";
  const line = `${summary.right} of ${summary.scored} tasks right${part}; ${summary.predictions} answers, ${summary.unreadable} unreadable${summary.without_reference ? `; ${summary.without_reference} tasks without a reference` : ""}`;
  const list = h("div", {}), shown = h("span", { class: "soft" });
  let show = "all";
  const find = h("input", { type: "search", placeholder: "Task id", "aria-label": "Find a task by its id", oninput: filter });
  const buttons = ["all", "right", "wrong", "unscored"].map(name => h("button", { type: "button", "aria-pressed": String(name === show), onclick: event => { show = name; buttons.forEach(each => each.setAttribute("aria-pressed", String(each === event.target))); filter(); } }, name === "unscored" ? "not scored" : name));
  const empty = new Map();
  // Grids are drawn when a task comes near the window: hundreds of tasks are thousands of canvases.
  const watcher = new IntersectionObserver(entries => entries.forEach(entry => { const task = empty.get(entry.target); if (task && entry.isIntersecting) { entry.target.append(...taskGrids(task)); empty.delete(entry.target); watcher.unobserve(entry.target); } }), { rootMargin: "600px" });
  const cards = tasks.map(task => {
    const votes = task.predictions ? `${task.votes.length ? task.votes[0] : 0} of ${task.predictions} answers agree` : "no answer: its prompt was too long";
    const card = h("article", { class: "card task" }, h("h2", {}, task.id, h("span", { class: task.state }, task.state === "unscored" ? "not scored" : task.state), h("span", { class: "soft" }, votes + (task.unreadable ? `, ${task.unreadable} unreadable` : ""))));
    empty.set(card, task); watcher.observe(card);
    return [task, card];
  });
  list.append(...cards.map(([, card]) => card));
  function filter() {
    const wanted = find.value.toLowerCase();
    let visible = 0;
    for (const [task, card] of cards) { card.hidden = !((show === "all" || task.state === show) && task.id.toLowerCase().includes(wanted)); visible += !card.hidden; }
    shown.textContent = `${visible} tasks shown`;
  }
  filter();
  main.replaceChildren(h("h1", {}, "Scores"), h("p", { "data-figure": "score" }, line), h("p", { class: "read" }, "Each task with its examples, its test input, the expected output and the answers of the model. Wrong cells have a white frame."), h("div", { class: "bar" }, ...buttons, find, shown), list);
  main.dataset.ready = "true";
  return () => watcher.disconnect();
}
