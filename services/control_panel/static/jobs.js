// The table of jobs: sorted by any column, filtered by text; tags and notes can be changed, ended
// jobs deleted.
import { api, byId, changed, duration, el, firstLine, moment, number, toast } from "./dom.js";

const OVER = ["succeeded", "failed", "cancelled"];
const seconds = (text) => (text ? Date.parse(text) / 1000 : null);

// A column: its title, a job's value to sort by (words from the first letter on, numbers from the
// largest), that value as text, and the content of the cell (by default the text).
const COLUMNS = [
  { title: "job", words: true, value: (job) => job.job_id, cell: (text, job, choose) => el("button", { class: "link", onclick: () => choose(job.job_id) }, text) },
  { title: "state", words: true, value: (job) => job.state, cell: (text) => el("span", { class: `pill ${text}` }, text) },
  { title: "priority", value: (job) => job.priority },
  { title: "started", value: (job) => seconds(job.started_at ?? job.created_at), text: (value) => (value === null ? "–" : moment(new Date(1000 * value))) },
  { title: "duration", value: took, text: (value) => (value === null ? "–" : duration(value)) },
  { title: "steps", value: (job) => job.step, text: (value, job) => `${value} / ${job.total_steps}` },
  { title: "last reward", value: (job) => job.metrics["reward/mean"] ?? job.metrics["team/mean"] ?? null, text: (value) => number(value) },
  { title: "tags", words: true, value: (job) => job.tags.join(", ") || null, text: (value) => value ?? "", cell: (_, job) => el("span", {}, ...job.tags.map((tag) => el("span", { class: "tag" }, tag))) },
  { title: "notes", words: true, value: (job) => job.notes || null, text: (value) => firstLine(value ?? ""), cell: (text, job) => el("div", { class: "notes", title: job.notes }, text) },
];
// The job that a row is about.
const HEADER = 0;
let [by, descending] = [3, true];
let known = [];

function took(job) {
  const began = seconds(job.started_at);
  return began === null ? null : (seconds(job.ended_at) ?? Date.now() / 1000) - began;
}

// Tags in a text, separated by commas.
export const tagsOf = (text) => [...new Set(text.split(",").map((tag) => tag.trim()).filter(Boolean))];

// What the filters of jobs look at.
export const searched = (job) => `${job.job_id} ${job.name} ${job.state} ${job.mode} ${job.tags.join(" ")} ${job.notes}`.toLowerCase();

// Draws the table of `jobs`; `choose` shows one of them.
export function drawJobTable(jobs, choose) {
  known = [jobs, choose];
  const wanted = byId("jobs-filter").value.toLowerCase();
  const found = jobs.filter((job) => searched(job).includes(wanted));
  const { value } = COLUMNS[by];
  // Jobs without a value are last, either way.
  const order = (a, b) => {
    const [one, other] = [value(a), value(b)];
    if (one === null || other === null) return (one === null) - (other === null);
    return (descending ? -1 : 1) * (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other);
  };
  const rows = found.sort(order).map((job) => COLUMNS.map((column) => (column.text ?? String)(column.value(job), job)));
  const table = byId("jobs");
  if (changed(table.tHead, [by, descending])) table.tHead.replaceChildren(head());
  if (!changed(table.tBodies[0], rows)) return;
  table.tBodies[0].replaceChildren(...found.map((job, i) => row(job, rows[i], choose)));
}

function head() {
  const sort = (i) => {
    [by, descending] = [i, i === by ? !descending : !COLUMNS[i].words];
    drawJobTable(...known);
    byId("jobs").tHead.querySelectorAll("button")[i].focus();
  };
  const columns = COLUMNS.map(({ title }, i) => el("th", { scope: "col", "aria-sort": i === by ? (descending ? "descending" : "ascending") : "none" }, el("button", { class: "link", onclick: () => sort(i) }, title, i === by ? (descending ? " ↓" : " ↑") : "")));
  return el("tr", {}, ...columns, el("th", { scope: "col" }, "change"));
}

function row(job, texts, choose) {
  const id = job.job_id;
  const edit = el("button", { "aria-label": `Edit tags and notes of ${id}`, onclick: () => annotate(job) }, "Edit");
  const remove = el("button", { class: "danger", "aria-label": `Delete ${id}`, onclick: () => forget(id) }, "Delete");
  const cells = COLUMNS.map(({ cell }, i) => {
    const content = cell ? cell(texts[i], job, choose) : texts[i];
    return i === HEADER ? el("th", { scope: "row" }, content) : el("td", {}, content);
  });
  return el("tr", { "data-job": id }, ...cells, el("td", {}, el("span", { class: "actions" }, edit, OVER.includes(job.state) ? remove : null)));
}

const dialog = byId("annotation");
let annotated = null;

function annotate(job) {
  annotated = job;
  const { tags, notes } = dialog.querySelector("form").elements;
  byId("annotation-title").textContent = `Tags and notes of ${job.job_id}`;
  [tags.value, notes.value] = [job.tags.join(", "), job.notes];
  dialog.returnValue = "";
  dialog.showModal();
}

dialog.addEventListener("close", async () => {
  if (dialog.returnValue !== "save") return;
  const { tags, notes } = dialog.querySelector("form").elements;
  const wanted = tagsOf(tags.value);
  const body = { add_tags: wanted.filter((tag) => !annotated.tags.includes(tag)), remove_tags: annotated.tags.filter((tag) => !wanted.includes(tag)), notes: notes.value };
  try {
    const job = await api(`/api/jobs/${encodeURIComponent(annotated.job_id)}`, { method: "PATCH", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
    dispatchEvent(new CustomEvent("annotated", { detail: job }));
    toast(`saved tags and notes of ${annotated.job_id}`);
  } catch (error) {
    toast(error.message);
  }
});

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
