// The frame of the application: pages by address, the list of datasets, and saving a page.
import { h } from "./dom.js";
import { ask, exported, savePage, used } from "./api.js";
import { hideTip } from "./plot.js";
import { runsPage } from "./runs.js";
import { samplesPage } from "./samples.js";
import { layersPage } from "./layers.js";
import { comparePage } from "./compare.js";
import { featuresPage } from "./features.js";
import { scorePage } from "./score.js";

const PAGES = { runs: ["Run", runsPage], samples: ["Samples", samplesPage], layers: ["Layers", layersPage], compare: ["Compare", comparePage], features: ["Features", featuresPage], score: ["Scores", scorePage] };
const main = document.getElementById("main"), nav = document.getElementById("nav"), tools = document.getElementById("tools");
let about = null, leave = null, turn = 0;

/* An address is #/page/dataset/part/part?name=value. */
function route() {
  const [path, search] = (location.hash || (exported && exported.start) || "#/runs/0").slice(2).split("?");
  const [page, root, ...rest] = path.split("/").map(decodeURIComponent);
  return { page: PAGES[page] ? page : "runs", root: Number(root) || 0, params: { path: rest, query: Object.fromEntries(new URLSearchParams(search || "")) } };
}

function address(page, root, path = [], query = {}) {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined)).toString();
  return `#/${[page, root, ...path].map(encodeURIComponent).join("/")}${search ? `?${search}` : ""}`;
}

function go(page, root, path, query) { location.hash = address(page, root, path, query); }

async function pages(root) {
  const shown = ["runs", "samples", "layers"];
  if (about.roots.length > 1) shown.push("compare");
  if (about.features) shown.push("features");
  const facts = await ask("dataset", { root }).catch(() => null);
  if (facts && facts.grids) shown.push("score");
  const has = name => !exported || Object.keys(exported.answers).some(key => key.startsWith({ runs: "run?", samples: "samples?", layers: "layers?", compare: "compare?", features: "features?", score: "score?" }[name]));
  return facts || !exported ? shown.filter(has) : Object.keys(PAGES).filter(has);
}

async function show() {
  const { page, root, params } = route(), mine = turn += 1;
  hideTip();
  leave?.(); leave = null;
  delete main.dataset.ready;
  used.clear();
  try {
    about = await ask("about");
    used.set("about", about);
    drawNav(page, root, ["runs", "samples", "layers"].filter(() => !exported));
    document.title = `${PAGES[page][0]} · ${about.roots[root] ? about.roots[root].url : ""} · spile`;
    pages(root).then(names => { if (mine === turn) drawNav(page, root, names); });
    const target = h("div", {});
    if (!main.querySelector("h1")) main.replaceChildren(h("p", { class: "loading" }, "Loading …"));
    const stop = await PAGES[page][1](proxy(target, mine), root, params, go, about);
    if (mine !== turn) stop?.(); else leave = stop || null;
  } catch (error) {
    if (mine === turn) { main.replaceChildren(h("h1", {}, PAGES[page][0]), h("p", { class: "error", role: "alert" }, error.message)); main.dataset.ready = "true"; }
  }
}

/* The main element for one page: a page that was left meanwhile changes nothing. */
function proxy(unused, mine) {
  return { replaceChildren: (...parts) => { if (mine === turn) main.replaceChildren(...parts); }, get dataset() { return mine === turn ? main.dataset : unused.dataset; } };
}

function drawNav(page, root, names) {
  const links = names.map(name => h("a", { href: address(name, root), "aria-current": name === page ? "page" : undefined }, PAGES[name][0]));
  nav.replaceChildren(...links);
  const several = about.roots.length > 1 ? h("select", { "aria-label": "Dataset", onchange: event => go(page, event.target.value) }, ...about.roots.map((each, n) => h("option", { value: n, selected: n === root }, each.url))) : null;
  const save = exported ? null : h("button", { type: "button", title: "Save this page as one HTML file", onclick: () => savePage() }, "Save page");
  tools.replaceChildren(...[several, save].filter(Boolean));
}

document.getElementById("skip").addEventListener("click", event => { event.preventDefault(); main.focus(); });
addEventListener("hashchange", show);
show();
