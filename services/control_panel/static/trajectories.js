// The kept conversations of a job: filter, search, pins, export; the conversation between the agents
// of one; and the job's samples in the experience store.
import { colour, named } from "./colours.js";
import { api, byId, changed, duration, el, firstLine, folded, number, toast } from "./dom.js";
import { TokenView } from "./tokens.js";

const PAGE = 60;
const TYPING_MS = 300;

export class Viewer {
  constructor() {
    this.job = null;
    this.selected = null;
    // The conversation on display, as returned by the REST interface.
    this.shown = null;
    this.more = 0;
    this.tokens = new TokenView();
    const form = byId("trajectory-filter");
    let due;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", () => {
      clearTimeout(due);
      due = setTimeout(() => this.refresh(this.job).catch((error) => toast(error.message)), TYPING_MS);
    });
    byId("trajectory-more").addEventListener("click", () => {
      this.more += 1;
      this.refresh(this.job).catch((error) => toast(error.message));
    });
    byId("pin").addEventListener("click", () => this.pin().catch((error) => toast(error.message)));
    byId("export").addEventListener("click", () => this.export().catch((error) => toast(error.message)));
    byId("token-colour").addEventListener("change", () => this.tokens.recolour());
    this.drawPins();
  }

  // Another job was chosen.
  forget(job) {
    this.job = job;
    this.selected = null;
    this.shown = null;
    this.more = 0;
    byId("conversation").replaceChildren(el("p", { class: "muted" }, "Choose a conversation to read what the agents said."));
  }

  query() {
    const query = new URLSearchParams({ limit: PAGE });
    for (const [name, value] of new FormData(byId("trajectory-filter"))) if (value !== "") query.set(name, value);
    return query;
  }

  async refresh(job) {
    if (!job) return;
    if (this.job !== job) this.forget(job);
    const found = [];
    let page = "";
    for (let read = 0; read <= this.more; read += 1) {
      const query = this.query();
      if (page) query.set("page", page);
      const reply = await api(`/api/jobs/${encodeURIComponent(job)}/trajectories?${query}`);
      if (this.job !== job) return;
      found.push(...reply.trajectories);
      page = reply.next_page;
      if (!page) break;
    }
    byId("trajectory-more").hidden = !page;
    byId("trajectory-count").textContent = `${found.length}${page ? " or more" : ""} found`;
    // Existing rows are kept in place, so that a click hits the right one.
    if (changed(byId("trajectory-list"), [job, found])) {
      const within = byId("trajectory-list").contains(document.activeElement) ? document.activeElement.dataset.trajectory : null;
      byId("trajectory-list").replaceChildren(...found.map((item) => el("li", {}, this.row(item, () => this.open(item.trajectory_id)))));
      const agents = [...new Set(found.flatMap((item) => Object.keys(item.rewards)))].sort();
      if (changed(byId("agents"), agents)) byId("agents").replaceChildren(...agents.map((name) => el("option", { value: name })));
      if (within) this.rows().find((row) => row.dataset.trajectory === within)?.focus();
    }
    if (!this.selected && found.length) await this.open(found[0].trajectory_id);
  }

  row(item, open) {
    const rewards = Object.entries(item.rewards).sort();
    const team = item.rewards.team ?? rewards[0]?.[1] ?? 0;
    return el(
      "button",
      { class: "row", "data-trajectory": item.trajectory_id, "aria-current": String(item.trajectory_id === this.selected), onclick: () => open().catch((error) => toast(error.message)) },
      el("span", {}, item.trajectory_id),
      el("span", { class: `pill ${item.state}` }, item.evaluation ? "held-out" : item.state),
      el("small", {}, rewards.map(([agent, value]) => `${agent} ${number(value)}`).join(" · ") || firstLine(item.reason)),
      el("small", {}, `step ${item.step} · ${item.turns} turns · ${duration(item.seconds)}${item.tokens_kept ? " · tokens" : ""}`),
      el("span", { class: "bar" }, el("span", { style: { width: `${Math.max(0, Math.min(1, team)) * 100}%` } })),
    );
  }

  rows() {
    return [...byId("trajectory-list").querySelectorAll("button")];
  }

  async open(id) {
    this.selected = id;
    this.mark();
    const job = this.job;
    const found = await api(`/api/jobs/${encodeURIComponent(job)}/trajectories/${encodeURIComponent(id)}?tokens=true`);
    // Another conversation was chosen meanwhile.
    if (this.selected === id && this.job === job) this.show({ job, ...found });
  }

  mark() {
    for (const row of document.querySelectorAll("#trajectory-list button, #pinned-list button")) {
      row.setAttribute("aria-current", String(row.dataset.trajectory === this.selected));
    }
  }

  show(found) {
    this.shown = found;
    const { summary, turns } = found;
    this.tokens.clear();
    const rewards = Object.entries(summary.rewards).sort().map(([agent, value]) => `${agent} ${number(value)}`);
    byId("conversation").scrollTop = 0;
    byId("conversation").replaceChildren(
      el("h2", {}, `${summary.trajectory_id} `, el("span", { class: `pill ${summary.state}` }, summary.state), el("small", {}, ` step ${summary.step} · ${rewards.join(" · ")}`)),
      summary.reason ? el("div", { class: "problem" }, folded(summary.reason)) : "",
      ...turns.map((turn) => this.turn(turn)),
    );
    this.tokens.ready(summary, turns);
    this.drawPins();
  }

  turn(turn) {
    const versions = turn.versions.map((span) => `@${span.version}`).join(" → ");
    const facts = [
      `${turn.policy}${versions}`,
      `${turn.response_tokens} tokens`,
      duration(turn.generate_seconds),
      turn.finish_reason,
      turn.reward === null ? null : `reward ${number(turn.reward)}`,
    ];
    // The last message is shown; earlier ones are folded, and built when they are opened.
    const asked = turn.messages.at(-1);
    const before = turn.messages.slice(0, -1);
    const fold = el("details", { class: "prompt" }, el("summary", {}, `${before.length} earlier message${before.length > 1 ? "s" : ""}`));
    fold.addEventListener("toggle", () => {
      if (fold.open && fold.children.length === 1) fold.append(...before.map((message) => el("pre", { class: `asked ${message.role}` }, el("b", {}, `${message.role} `), message.content)));
    }, { once: true });
    return el(
      "div",
      { class: "turn", "--speaker": colour(turn.agent) },
      before.length ? fold : null,
      asked ? el("div", { class: `asked ${asked.role}`, title: "Given, not generated: no loss" }, el("small", {}, `${asked.role} · masked `), asked.content) : null,
      el("div", { class: "who" }, el("b", {}, turn.agent), facts.filter(Boolean).join(" · ")),
      this.tokens.bubble(turn),
    );
  }

  onKey(event) {
    const rows = this.rows();
    const at = rows.findIndex((row) => row.dataset.trajectory === this.selected);
    const by = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
    const arrows = event.key.startsWith("Arrow");
    if (by && rows.length && (!arrows || byId("trajectory-list").contains(document.activeElement))) {
      event.preventDefault();
      const row = rows[Math.max(0, Math.min(rows.length - 1, at + by))];
      row.focus();
      row.click();
    } else if (event.key === "/") {
      event.preventDefault();
      byId("trajectory-filter").elements.text.focus();
    } else if (event.key === "p") {
      byId("pin").click();
    } else if (event.key === "e") {
      byId("export").click();
    }
  }

  // --- pins: copies in the browser, which remain when the cluster has dropped a conversation ------

  async pin() {
    if (!this.shown) return;
    const key = pinKey(this.shown);
    const pinned = await pins("get", key);
    await pins(pinned ? "delete" : "put", pinned ? key : { key, ...this.shown });
    await this.drawPins();
  }

  async drawPins() {
    const all = await pins("getAll");
    byId("pinned").hidden = !all.length;
    const here = this.shown && all.some((one) => one.key === pinKey(this.shown));
    byId("pin").setAttribute("aria-pressed", String(Boolean(here)));
    byId("pin").textContent = here ? "Unpin" : "Pin";
    if (!changed(byId("pinned-list"), all.map((one) => one.key))) return this.mark();
    byId("pinned-list").replaceChildren(
      ...all.map((one) =>
        el("li", {}, this.row(one.summary, async () => {
          this.selected = one.summary.trajectory_id;
          this.mark();
          this.show(one);
        }), el("small", { class: "muted" }, one.job))),
    );
  }

  async export() {
    if (!this.shown) return;
    const text = JSON.stringify(this.shown, null, 1);
    const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: `${this.shown.job}-${this.shown.summary.trajectory_id}.json` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }
}

const pinKey = (shown) => `${shown.job} ${shown.summary.trajectory_id}`;

// One call of the browser's store of pinned conversations.
function pins(call, ...args) {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open("troupe", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("pins", { keyPath: "key" });
    opening.onerror = () => reject(opening.error);
    opening.onsuccess = () => {
      const done = opening.result.transaction("pins", "readwrite").objectStore("pins")[call](...args);
      done.onsuccess = () => resolve(done.result);
      done.onerror = () => reject(done.error);
    };
  });
}

// --- samples, and their audit ---------------------------------------------------------------------

const mib = (bytes) => `${number(bytes / 2 ** 20)} MiB`;
let shownSamples = null;

// over: the job has ended, and the store has freed its rows.
export async function drawSamples(job, over) {
  if (job !== shownSamples) {
    shownSamples = job;
    byId("audit-result").textContent = "Was every sample trained once, or dropped with a reason?";
    clear("");
  }
  if (over) return clear("freed when the job ended; the audit shows their outcome");
  let found;
  try {
    found = await api(`/api/jobs/${encodeURIComponent(job)}/tables`);
  } catch (error) {
    // Clear numbers that are outdated or of another job.
    if (job === shownSamples) clear(error.message);
    return;
  }
  if (job !== shownSamples) return;
  const mark = found.high_water_bytes ? ` of ${mib(found.high_water_bytes)}` : "";
  const full = found.over_high_water ? " · above the mark, so rollout has to wait" : "";
  byId("samples-store").textContent = `${mib(found.payload_bytes)}${mark} of rows · Redis ${mib(found.redis_bytes)}${full}`;
  const rows = found.tables.map((one) => {
    const lag = Math.max(0, one.newest_step - one.committed_step);
    const cells = [one.pending, one.ready, one.claimed, one.trained, one.dropped].map((n) => n.toLocaleString("en"));
    cells.push(`${lag} step${lag === 1 ? "" : "s"}`);
    cells.push(one.oldest_pending_sample ? duration(one.oldest_pending_seconds) : "–", mib(one.payload_bytes));
    return el("tr", {}, el("td", {}, ...named(one.policy)), ...cells.map((text) => el("td", {}, text)));
  });
  byId("samples").tBodies[0].replaceChildren(...rows);
  byId("samples-dropped").textContent = found.tables
    .flatMap((one) => Object.entries(one.drop_reasons).map(([reason, count]) => `${one.policy} dropped ${count} rows or trajectories: ${reason}`))
    .join(" · ");
}

function clear(why) {
  byId("samples-store").textContent = why;
  byId("samples").tBodies[0].replaceChildren();
  byId("samples-dropped").textContent = "";
}

export async function audit(job) {
  byId("audit-result").textContent = "reading the log of every step…";
  const found = await api(`/api/jobs/${encodeURIComponent(job)}/audit`);
  if (job !== shownSamples) return;
  const sum = (field) => found.tables.policies.reduce((total, one) => total + one[field], 0);
  const good = !found.violations.length && !sum("lost") && !sum("duplicated");
  const facts = `${sum("appended")} samples: ${sum("trained")} trained, ${sum("dropped")} dropped, ${sum("live")} live, ${sum("lost")} lost, ${sum("duplicated")} duplicated`;
  byId("audit-result").textContent = `${good ? "passed" : "FAILED"} · ${facts}${found.violations.map((text) => ` · ${text}`).join("")}`;
}
