// Requests to the server, or to the answers in an exported file.
import { h } from "./dom.js";

const embedded = document.getElementById("data");
export const exported = embedded ? JSON.parse(embedded.textContent) : null;
export const used = new Map();  // the answers that the current page was drawn from

const TOKEN = "spile-token";
if (location.hash.startsWith("#token=")) {
  sessionStorage.setItem(TOKEN, decodeURIComponent(location.hash.slice(7)));
  history.replaceState(null, "", location.pathname);
}

function headers() {
  const token = exported ? null : sessionStorage.getItem(TOKEN);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

export function requestKey(name, params = {}) {
  const parts = Object.entries(params).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  const text = parts.sort(([a], [b]) => a < b ? -1 : 1).map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&");
  return name + (text && `?${text}`);
}

export async function ask(name, params = {}) {
  const key = requestKey(name, params);
  if (exported) {
    const found = exported.answers[key];
    if (!found) throw new Error("This part is not in the exported file. spile view shows it.");
    if (found.error) throw new Error(found.error);
    return found;
  }
  let reply;
  try {
    reply = await fetch(`api/${key}`, { headers: headers() });
  } catch {
    lost("The server does not answer. Trying again …");
    await new Promise(done => setTimeout(done, 1500));
    return ask(name, params);
  }
  const found = await reply.json();
  if (reply.status === 401) lost(found.error); else back();
  if (!reply.ok) throw new Error(found.error);
  used.set(key, found);
  return found;
}

const banner = document.getElementById("banner");
export function lost(text) { if (banner.hidden || banner.textContent !== text) { banner.textContent = text; banner.hidden = false; } }
export function back() { banner.hidden = true; }

/* Follows a run. Server-sent events are read with fetch, because EventSource cannot send the token in a header. */
export function follow(root, show) {
  if (exported) { ask("run", { root }).then(show, () => {}); return () => {}; }
  let over = false, wait = 500, control = null;
  (async () => {
    while (!over) {
      try {
        control = new AbortController();
        const reply = await fetch(`api/live?root=${root}`, { headers: headers(), signal: control.signal });
        if (!reply.ok) throw new Error((await reply.json()).error);
        const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
        let text = "";
        for (;;) {
          const { value, done } = await reader.read();
          if (done || over) break;
          const parts = (text + value).split("\n\n");
          text = parts.pop();
          for (const part of parts) receive(part);
          wait = 500;
        }
      } catch (error) {
        if (!over) lost(error instanceof TypeError || error.name === "AbortError" ? "The server does not answer. Trying again …" : error.message);
      }
      if (!over) { if (banner.hidden) lost("The server does not answer. Trying again …"); await new Promise(done => setTimeout(done, wait)); wait = Math.min(10000, wait * 2); }
    }
  })();

  function receive(part) {
    const event = /^event: (.*)$/m.exec(part), data = /^data: (.*)$/m.exec(part);
    if (!data) { if (!/^event/.test(part)) back(); return; }
    const found = JSON.parse(data[1]);
    if (event[1] === "problem") { lost(`The storage does not answer: ${found.error} Trying again …`); return; }
    back();
    used.set(requestKey("run", { root }), found);
    show(found);
  }
  return () => { over = true; control?.abort(); };
}

/* Saves the current page as one file: the page itself with the answers that it was drawn from. */
export async function savePage() {
  const template = await (await fetch("template")).text();
  const data = JSON.stringify({ answers: Object.fromEntries(used), start: location.hash });
  const safe = data.replace(/[<>&\u2028\u2029]/g, each => `\\u${each.charCodeAt(0).toString(16).padStart(4, "0")}`);
  download("spile.html", new Blob([template.replace("__DATA__", () => safe)], { type: "text/html" }));
}

export function download(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
