// The dialog with which a job goes on: with more steps, or with other values of its settings.
import { api, byId, el } from "./dom.js";

const dialog = byId("going-on");
const form = dialog.querySelector("form");
const settings = byId("going-on-settings");
let job = null;
// The values that may change, by field.
let values = {};

// Opens the dialog for a job that does not run.
export async function goOn(chosen) {
  const found = await api(`/api/jobs/${encodeURIComponent(chosen.job_id)}/specification`);
  [job, values] = [chosen, found.changeable];
  byId("going-on-title").textContent = `Go on with ${job.job_id} after step ${job.step}`;
  form.elements.steps.value = job.total_steps;
  byId("going-on-problem").textContent = "";
  const names = Object.keys(values).filter((name) => name !== "pipeline.steps");
  byId("going-on-fields").replaceChildren(...names.map((name) => el("option", { value: name }, shown(values[name]))));
  settings.replaceChildren();
  add();
  dialog.showModal();
  form.elements.steps.select();
}

const shown = (value) => (value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));

// Adds a row for one setting: its field, and its new value, which shows the present one.
function add() {
  const value = el("input", { name: "value", autocomplete: "off", spellcheck: "false" });
  const tell = () => (value.placeholder = field.value in values ? `now ${shown(values[field.value])}` : "");
  const field = el("input", { name: "field", list: "going-on-fields", autocomplete: "off", spellcheck: "false", placeholder: "policies.NAME.optimizer.lr", oninput: tell });
  settings.append(el("li", {}, el("label", {}, "field ", field), el("label", {}, "value ", value)));
  return field;
}

// The assignments KEY.PATH=VALUE, as of `troupe jobs resume --set`.
function assignments() {
  const found = [];
  if (Number(form.elements.steps.value) !== job.total_steps) found.push(`pipeline.steps=${form.elements.steps.value}`);
  for (const row of settings.children) {
    const [field, value] = row.querySelectorAll("input");
    if (field.value.trim()) found.push(`${field.value.trim()}=${value.value}`);
  }
  return found;
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  byId("going-on-problem").textContent = "";
  const send = form.querySelector(".primary");
  send.disabled = true;
  try {
    const query = new URLSearchParams(assignments().map((text) => ["set", text]));
    const resumed = await api(`/api/jobs/${encodeURIComponent(job.job_id)}/resume?${query}`, { method: "POST" });
    dialog.close();
    dispatchEvent(new CustomEvent("resumed", { detail: resumed }));
  } catch (error) {
    byId("going-on-problem").textContent = error.message;
  } finally {
    send.disabled = false;
  }
});
byId("going-on-add").addEventListener("click", () => add().focus());
byId("going-on-cancel").addEventListener("click", () => dialog.close());
