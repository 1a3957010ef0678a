// The page of a run: totals, throughput, streams or workers, quarantine, events and logs.
import { ago, h, s, bytes, clock, count, duration, percent, table, virtualTable } from "./dom.js";
import { ask, follow } from "./api.js";
import { figure, frame, hover } from "./plot.js";

const ORDER = ["failed", "damaged", "silent", "stopped", "waiting", "working", "done"];

export async function runsPage(main, root) {
  const tiles = h("dl", { class: "tiles" }), bar = h("progress", { max: 100, "aria-label": "Samples that are done" });
  const title = h("h1", {}, "Run"), line = h("p", { class: "soft" });
  const detail = h("section", { class: "card", hidden: true, "aria-live": "polite" });
  const notes = h("div", {}), events = h("div", {});
  let state = null, rows = [], place = {}, wanted = "", only = "", by = null, opened = null;

  const plot = figure("Throughput over time", "Tokens per second of all streams together, from the times of their commits. A gap means that no stream was working.", drawRate);
  const grid = virtualTable({
    label: "Streams", height: 460,
    columns: [
      { title: "Stream", width: "minmax(100px,1.4fr)", min: 100, left: true }, { title: "Zone", width: "minmax(60px,1fr)", min: 60, left: true }, { title: "State", width: "100px", min: 100, left: true },
      { title: "Done", width: "62px", min: 62 }, { title: "Samples", width: "82px", min: 82 }, { title: "Tokens/s", width: "78px", min: 78 }, { title: "Time left", width: "96px", min: 96 },
      { title: "Last commit", width: "96px", min: 96 }, { title: "Heartbeat", width: "84px", min: 84 }, { title: "Restarts", width: "72px", min: 72 }, { title: "Stored", width: "80px", min: 80 }, { title: "Reason", width: "minmax(90px,2fr)", min: 90, left: true },
    ],
    row: cells, open: n => show(rows[n][place.number]), sort: (column, down) => { by = [column, down]; arrange(); },
  });
  const search = h("input", { type: "search", placeholder: "Name, zone or reason", "aria-label": "Find a stream", oninput: () => { wanted = search.value.toLowerCase(); arrange(); } });
  const filters = h("span", { class: "bar" });
  const shown = h("span", { class: "soft" });

  main.replaceChildren(title, line, bar, tiles, plot.node,
    h("section", { class: "card" }, h("h2", {}, "Streams"), h("p", { class: "read" }, "One line for each stream of the data. A working stream sends a heartbeat every 30 seconds; after 150 seconds without one it is silent. Choose a line for its log."), h("div", { class: "bar" }, search, filters, shown), grid.node),
    detail, notes, events);

  const KEYS = ["name", "zone", "state", "done", "samples", "rate", "seconds_left", "last_commit", "age", "restarts", "bytes", "reason"];
  function key(row, column) {
    const name = KEYS[column];
    return name === "done" ? row[place.samples] / (row[place.expected] || Infinity) : name === "state" ? ORDER.indexOf(row[place.state]) : row[place[name]];
  }

  function arrange() {
    if (!state) return;
    rows = state.rows.filter(row => (!only || row[place.state] === only) && (!wanted || `${row[place.name]} ${row[place.zone]} ${row[place.reason]}`.toLowerCase().includes(wanted)));
    const [column, down] = by || [2, false];
    rows.sort((a, b) => { const x = key(a, column), y = key(b, column); return (x === y ? a[0] - b[0] : x === null ? 1 : y === null ? -1 : x < y ? -1 : 1) * (down && x !== y ? -1 : 1); });
    shown.textContent = `${count(rows.length)} of ${count(state.rows.length)} streams`;
    grid.resize(rows.length);
  }

  function cells(n) {
    const row = rows[n], get = name => row[place[name]], now = state.taken;
    const status = get("state") === "working" && get("phase") ? get("phase") : get("state");
    return [get("name"), get("zone"), [status, `left state s-${get("state")}`], percent(get("expected") ? Math.min(100, 100 * get("samples") / get("expected")) : null), count(get("samples")), get("rate") ? count(get("rate")) : "", get("state") === "done" ? "" : duration(get("seconds_left")),
      ago(get("last_commit") ? now - get("last_commit") : null), ago(get("age")), count(get("restarts")), bytes(get("bytes")), get("reason") || ""];
  }

  function drawRate(width) {
    const { times, rates } = state ? state.throughput : { times: [], rates: [] };
    if (!times.length) return s("svg", { width, height: 30 }, s("text", { x: 0, y: 18, class: "label" }, "No commit yet."));
    const first = times[0], span = times.at(-1) - first || 1, unit = span > 172800 ? ["days", 86400] : span > 7200 ? ["hours", 3600] : span > 180 ? ["minutes", 60] : ["seconds", 1];
    const f = frame(width, 220, { label: `Time since ${clock(first)} UTC (${unit[0]})`, low: 0, high: span / unit[1] }, { label: "Tokens per second", low: 0, high: Math.max(...rates) * 1.05 || 1, format: value => count(value) });
    const xs = times.map(time => f.px((time - first) / unit[1])), ys = rates.map(f.py);
    f.svg.append(s("path", { d: `M${xs[0]},${f.py(0)}L${xs.map((x, n) => `${x.toFixed(1)},${ys[n].toFixed(1)}`).join("L")}L${xs.at(-1)},${f.py(0)}Z`, fill: "var(--series-1)", opacity: 0.18 }), s("path", { d: `M${xs.map((x, n) => `${x.toFixed(1)},${ys[n].toFixed(1)}`).join("L")}`, fill: "none", stroke: "var(--series-1)", "stroke-width": 1.8 }));
    hover(f.svg, xs, ys, n => `${clock(times[n])} UTC: ${count(rates[n])} tokens/s`);
    return f.svg;
  }

  function tile(name, value, extra) { return h("div", { class: "tile" }, h("dt", {}, name), h("dd", { "data-figure": name }, value, extra ? h("span", { class: "soft" }, extra) : "")); }

  function update(found) {
    const began = performance.now();
    state = found;
    state.columns.forEach((name, n) => { place[name] = n; });
    title.textContent = state.root;
    const fleet = state.fleet, all = state.totals;
    line.textContent = state.done ? "Every stream is done." : `Updated ${clock(state.taken)} UTC.${state.never_begun ? ` ${state.never_begun} streams have not begun.` : ""}${fleet && fleet.stopped ? ` Stopped: ${fleet.stopped}` : ""}`;
    bar.value = state.percent ?? 0;
    tiles.replaceChildren(tile("Done", percent(state.percent)), tile("Samples", count(all.samples)), tile("Tokens", count(all.tokens)), tile("Tokens/s", count(all.tokens_per_second)), tile("Time left", state.done ? "done" : duration(state.seconds_left)),
      tile("Stored", bytes(all.bytes)), tile("Shards committed", count(all.committed)), tile("Streams", count(state.rows.length), state.needs_recovery ? ` ${count(state.needs_recovery)} need recovery` : ""),
      ...(fleet ? [tile("Spent", `$${fleet.dollars.toFixed(2)}`, fleet.budget ? ` of $${fleet.budget.toFixed(2)}` : ""), tile("Workers", count(fleet.workers))] : []));
    const known = ORDER.filter(name => state.states[name]);
    if (filters.dataset.known !== known.join()) {
      filters.dataset.known = known.join();
      filters.replaceChildren(...(known.length > 1 ? ["", ...known] : []).map(name => h("button", { type: "button", "aria-pressed": String(name === only), onclick: event => { only = name; filters.querySelectorAll("button").forEach(each => each.setAttribute("aria-pressed", String(each === event.target))); arrange(); } }, name || "all")));
    }
    notes.replaceChildren(...(state.quarantined.length ? [h("section", { class: "card" }, h("h2", {}, "Quarantine"), h("p", { class: "read" }, "Samples that were set aside because workers ended when they computed them."), h("ul", {}, ...state.quarantined.map(each => h("li", {}, each))))] : []));
    plot.redraw(); arrange();
    main.dataset.update = (performance.now() - began).toFixed(1);
    main.dataset.ready = "true";
  }

  async function show(stream) {
    opened = stream;
    detail.hidden = false;
    try {
      const found = await ask("stream", { root, stream });
      if (opened !== stream) return;
      const commits = found.commits.slice().reverse().map(([time, attempt, samples, tokens, size]) => [clock(time), attempt, count(samples), count(tokens), bytes(size)]);
      detail.replaceChildren(h("h2", {}, `${found.name}: ${found.status}`), found.host ? h("p", { class: "soft" }, `Host ${found.host}`) : "", found.last_error ? h("p", { class: "error" }, found.last_error) : "",
        h("h3", {}, "Log"), h("pre", { tabindex: "0", role: "region", "aria-label": "Log" }, found.log.join("\n") || "No lines."), h("h3", {}, "Last commits"),
        table([["Time (UTC)", "left"], ["Attempt", "left"], ["Samples"], ["Tokens"], ["Bytes"]], commits, "Last commits"));
    } catch (error) { detail.replaceChildren(h("p", { class: "error" }, error.message)); }
  }

  const stop = follow(root, update);
  ask("events", { root }).then(found => {
    if (!found.events.length) return;
    const lines = found.events.map(each => [each.time, each.verb, each.name, each.zone, each.reason, each.result]);
    events.replaceChildren(h("section", { class: "card" }, h("h2", {}, "Events"), h("p", { class: "read" }, "What the fleet's monitors did, the newest first, with the reason."), table([["Time", "left"], ["Action", "left"], ["Worker", "left"], ["Zone", "left"], ["Reason", "left"], ["Result", "left"]], lines, "Events")));
  }, () => {});
  return stop;
}
