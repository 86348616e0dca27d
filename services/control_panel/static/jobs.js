// The table of jobs: sorted by any column, filtered by text; ended jobs can be deleted.
import { api, byId, changed, duration, el, number, toast } from "./dom.js";

const OVER = ["succeeded", "failed", "cancelled"];
const seconds = (text) => (text ? Date.parse(text) / 1000 : null);

// Of each column: its title, a job's value to sort by, and that value as text.
const COLUMNS = [
  ["job", (job) => job.job_id],
  ["state", (job) => job.state],
  ["started", (job) => seconds(job.started_at ?? job.created_at), (value) => (value === null ? "–" : new Date(1000 * value).toLocaleString())],
  ["duration", took, (value) => (value === null ? "–" : duration(value))],
  ["steps", (job) => job.step, (value, job) => `${value} / ${job.total_steps}`],
  ["last reward", (job) => job.metrics["reward/mean"] ?? job.metrics["team/mean"] ?? null, (value) => number(value)],
];
let [by, descending] = [2, true];
let known = [];

function took(job) {
  const began = seconds(job.started_at);
  return began === null ? null : (seconds(job.ended_at) ?? Date.now() / 1000) - began;
}

// Draws the table of `jobs`; `choose` shows one of them.
export function drawJobTable(jobs, choose) {
  known = [jobs, choose];
  const wanted = byId("jobs-filter").value.toLowerCase();
  const found = jobs.filter((job) => `${job.job_id} ${job.name} ${job.state} ${job.mode}`.toLowerCase().includes(wanted));
  const value = COLUMNS[by][1];
  // Jobs without a value are last, either way.
  const order = (a, b) => {
    const [one, other] = [value(a), value(b)];
    if (one === null || other === null) return (one === null) - (other === null);
    return (descending ? -1 : 1) * (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other);
  };
  const rows = found.sort(order).map((job) => COLUMNS.map(([, of, text = String]) => text(of(job), job)));
  const table = byId("jobs");
  if (changed(table.tHead, [by, descending])) table.tHead.replaceChildren(head());
  if (!changed(table.tBodies[0], rows)) return;
  table.tBodies[0].replaceChildren(...found.map((job, i) => row(job, rows[i], choose)));
}

function head() {
  const sort = (i) => {
    [by, descending] = [i, i === by ? !descending : i > 1];
    drawJobTable(...known);
    byId("jobs").tHead.querySelectorAll("button")[i].focus();
  };
  const columns = COLUMNS.map(([title], i) => el("th", { scope: "col", "aria-sort": i === by ? (descending ? "descending" : "ascending") : "none" }, el("button", { class: "link", onclick: () => sort(i) }, title, i === by ? (descending ? " ↓" : " ↑") : "")));
  return el("tr", {}, ...columns, el("th", { scope: "col" }, "delete"));
}

function row(job, [id, state, ...texts], choose) {
  const remove = el("button", { class: "danger", "aria-label": `Delete ${id}`, onclick: () => forget(id) }, "Delete");
  return el(
    "tr",
    { "data-job": id },
    el("th", { scope: "row" }, el("button", { class: "link", onclick: () => choose(id) }, id)),
    el("td", {}, el("span", { class: `pill ${state}` }, state)),
    ...texts.map((text) => el("td", {}, text)),
    el("td", {}, OVER.includes(state) ? remove : "–"),
  );
}

async function forget(id) {
  if (!confirm(`Delete ${id} from the cluster: its record, metrics and conversations? Its directory with checkpoints stays.`)) return;
  try {
    await api(`/api/jobs/${encodeURIComponent(id)}/forget`, { method: "POST" });
    dispatchEvent(new CustomEvent("forgotten", { detail: id }));
    toast(`deleted ${id}`);
  } catch (error) {
    toast(error.message);
  }
}

byId("jobs-filter").addEventListener("input", () => known.length && drawJobTable(...known));
