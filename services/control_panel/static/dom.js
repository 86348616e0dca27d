// Small helpers for building the page. Text is always set as text, never as markup.

export const byId = (id) => document.getElementById(id);

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key.startsWith("--")) node.style.setProperty(key, value);
    // The content security policy forbids style attributes.
    else if (key === "style") for (const [name, text] of Object.entries(value)) node.style.setProperty(name, text);
    else if (value !== undefined && value !== null) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const drawn = new WeakMap();

// Whether `node` must be redrawn, since it does not show `data`.
export function changed(node, data) {
  const text = JSON.stringify(data);
  if (drawn.get(node) === text) return false;
  drawn.set(node, text);
  return true;
}

export function number(value, digits = 3) {
  if (value === undefined || value === null || Number.isNaN(value)) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(digits)).toString();
}

// The bounds of a confidence interval.
export const inBrackets = (low, high) => `[${number(low)}, ${number(high)}]`;

export function duration(seconds) {
  if (!Number.isFinite(seconds) || seconds < 0) return "–";
  const s = Math.round(seconds);
  if (s < 60) return `${s}s`;
  if (s < 3600) return `${Math.floor(s / 60)}m ${s % 60}s`;
  return `${Math.floor(s / 3600)}h ${Math.floor((s % 3600) / 60)}m`;
}

// A date with its time of day, without the year and seconds.
export const moment = (date) => date.toLocaleString([], { month: "short", day: "numeric", hour: "numeric", minute: "2-digit" });

let hide;
export function toast(text) {
  const node = byId("toast");
  node.textContent = text;
  node.classList.add("show");
  clearTimeout(hide);
  hide = setTimeout(() => node.classList.remove("show"), 5000);
}

// The longest first line of a folded text.
const MOST_SHOWN = 160;

// Returns the first line of a text, shortened.
export function firstLine(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > MOST_SHOWN ? `${line.slice(0, MOST_SHOWN)} …` : line;
}

// A text of which only the first line shows until one opens it; a short text is shown whole.
export function folded(text) {
  const whole = text.trim();
  const first = firstLine(whole);
  if (first === whole) return el("span", {}, text);
  // A first line that shows is not repeated.
  const rest = whole.startsWith(`${first}\n`) ? whole.slice(first.length + 1) : whole;
  return el("details", { class: "folded" }, el("summary", {}, first), el("pre", {}, rest));
}

// A message and its remedy, as sentences.
export function advice(message, remedy) {
  if (!remedy) return message;
  return `${message}${/[.!?]$/.test(message) ? "" : "."} ${remedy}`;
}

// Without a session only the form for the token shows; with one the page reloads.
function signIn() {
  if (document.body.classList.contains("signed-out")) return;
  document.body.classList.add("signed-out");
  const form = byId("sign-in");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const problem = byId("sign-in-problem");
    problem.textContent = "";
    try {
      const headers = { "content-type": "application/json" };
      const reply = await fetch("/session", { method: "POST", headers, body: JSON.stringify({ token: form.elements.token.value.trim() }) });
      if (reply.ok) return location.reload();
      problem.textContent = reply.status === 401 ? "This is not the cluster's token." : `The panel answered ${reply.status}: try again.`;
    } catch {
      problem.textContent = "The panel is away: try again.";
    }
    form.elements.token.select();
  });
  form.elements.token.focus();
}

async function asked(path, options) {
  const reply = await fetch(path, options);
  if (reply.status === 401) signIn();
  return reply;
}

// A call of the REST interface. Throws an Error whose message names field and remedy, with `kind`.
export async function api(path, options = {}) {
  const reply = await asked(path, options);
  const body = await reply.json();
  if (!reply.ok) {
    const field = body.field ? `${body.field}${body.value ? ` = ${body.value}` : ""}: ` : "";
    const error = new Error(`${field}${advice(body.detail ?? reply.statusText, body.remedy)}`);
    error.kind = body.title;
    throw error;
  }
  return body;
}

// The items of a page of a list, and the token of the next page: "" when there is none.
export async function apiPage(path) {
  const reply = await asked(path);
  const body = await reply.json();
  if (!reply.ok) throw new Error(advice(body.detail ?? reply.statusText, body.remedy));
  const next = reply.headers.get("link")?.match(/<([^>]+)>; rel="next"/)?.[1];
  return [body, next ? new URL(next, location.href).searchParams.get("page") : ""];
}
