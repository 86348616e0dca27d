// Jobs laid over one another: the curves of a metric, and the differences of their specifications.
import { Chart, MetricTable, curves } from "./charts.js";
import { assign, named } from "./colours.js";
import { api, byId, changed, el, number } from "./dom.js";
import { searched } from "./jobs.js";

const MOST_SHOWN = 300;
const jobsChart = new Chart(byId("chart-compare"), { spans: true });
const given = new URLSearchParams(location.search);
const chosen = new Set((given.get("with") ?? "").split(",").filter(Boolean));
const specs = new Map();
// By job and metric.
const tables = new Map();
let known = [];
let metric = given.get("metric") ?? "";

// All jobs, newest first, from the cluster's stream.
export function drawJobChoice(jobs, current) {
  known = jobs;
  if (!chosen.size && current) chosen.add(current);
  const wanted = byId("compare-filter").value.toLowerCase();
  const fits = jobs.filter((job) => chosen.has(job.job_id) || searched(job).includes(wanted)).slice(0, MOST_SHOWN);
  if (!changed(byId("compare-jobs"), [fits.map((job) => [job.job_id, job.state]), [...chosen]])) return;
  byId("compare-jobs").replaceChildren(
    ...fits.map((job) =>
      el(
        "label",
        {},
        el("input", { type: "checkbox", value: job.job_id, checked: chosen.has(job.job_id) ? "" : null, onchange: (event) => choose(job.job_id, event.target.checked) }),
        ...(chosen.has(job.job_id) ? named(job.job_id, assign(chosen)) : [job.job_id]),
        " ",
        el("span", { class: `pill ${job.state}` }, job.state),
      )),
  );
  const names = [...new Set(jobs.filter((job) => chosen.has(job.job_id)).flatMap((job) => Object.keys(job.metrics)))].sort();
  if (!metric) metric = names.find((name) => name === "team/mean") ?? names.find((name) => /^reward\/.*mean$/.test(name)) ?? names[0] ?? "";
  if (changed(byId("compare-metrics"), names)) byId("compare-metrics").replaceChildren(...names.map((name) => el("option", { value: name })));
  if (document.activeElement !== byId("compare-metric")) byId("compare-metric").value = metric;
}

function choose(id, on) {
  if (on) chosen.add(id);
  else chosen.delete(id);
  remember();
  compareJobs().catch((error) => (byId("compare-problem").textContent = error.message));
}

function remember() {
  const query = new URLSearchParams(location.search);
  query.set("with", [...chosen].join(","));
  query.set("metric", metric);
  history.replaceState(null, "", `?${query}${location.hash}`);
}

byId("compare-metric").addEventListener("change", (event) => {
  metric = event.target.value;
  remember();
  compareJobs().catch((error) => (byId("compare-problem").textContent = error.message));
});
byId("compare-filter").addEventListener("input", () => drawJobChoice(known, null));

// Reads the metric's new values of each chosen job, and draws them.
export async function compareJobs() {
  byId("compare-problem").textContent = "";
  const ids = [...chosen];
  await Promise.all(ids.map(async (id) => {
    const path = `/api/jobs/${encodeURIComponent(id)}`;
    if (!specs.has(id)) specs.set(id, JSON.parse((await api(path)).spec));
    if (!metric) return;
    const key = `${id} ${metric}`;
    // Take all pages or none: the next request begins after `reached`.
    const table = tables.get(key) ?? new MetricTable();
    // A step's row exists once the step is counted; an evaluation's row may come steps later.
    const done = metric.startsWith("evaluation") ? undefined : known.find((job) => job.job_id === id)?.step;
    const pages = [];
    for await (const page of curves(id, [metric], table.reached)) pages.push(page);
    for (const page of pages) table.merge(page.steps, page.columns);
    table.reached = done ?? table.steps.at(-1);
    tables.set(key, table);
  }));
  const began = performance.now();
  drawCurves(ids);
  drawDifferences(ids);
  performance.measure("troupe-compare", { start: began });
}

function drawCurves(ids) {
  const found = ids.map((id) => [id, tables.get(`${id} ${metric}`)]).filter(([, table]) => table?.steps.length);
  const steps = [...new Set(found.flatMap(([, table]) => table.steps))].sort((a, b) => a - b);
  const series = found.map(([id, table]) => {
    const values = table.column(metric);
    const at = new Map(table.steps.map((step, i) => [step, values[i]]));
    return { name: id, values: steps.map((step) => at.get(step) ?? null) };
  });
  // In the order of choice: a further job changes no colour.
  jobsChart.among = assign(ids);
  jobsChart.draw(steps, series);
  byId("compare-values").tBodies[0].replaceChildren(
    ...found.map(([id, table]) => {
      const values = table.column(metric).filter((value) => value !== null);
      const job = known.find((one) => one.job_id === id);
      let [least, most] = [Infinity, -Infinity];
      for (const value of values) [least, most] = [Math.min(least, value), Math.max(most, value)];
      return el("tr", {}, el("th", { scope: "row" }, ...named(id, jobsChart.among)), ...[job?.state ?? "–", String(table.steps.at(-1)), number(values.at(-1)), number(least), number(most)].map((text) => el("td", {}, text)));
    }),
  );
}

// "section.field" by value; empty sections count as values.
function flat(value, path, found) {
  const inner = value && typeof value === "object" && !Array.isArray(value) ? Object.entries(value) : [];
  for (const [name, one] of inner) flat(one, path ? `${path}.${name}` : name, found);
  if (!inner.length) found.set(path, JSON.stringify(value));
  return found;
}

function drawDifferences(ids) {
  const shown = ids.filter((id) => specs.has(id));
  const fields = shown.map((id) => flat(specs.get(id), "", new Map()));
  const paths = [...new Set(fields.flatMap((one) => [...one.keys()]))].filter((path) => new Set(fields.map((one) => one.get(path))).size > 1);
  byId("compare-same").textContent = shown.length < 2 ? "Choose two jobs or more." : paths.length ? `${paths.length} of ${new Set(fields.flatMap((one) => [...one.keys()])).size} fields differ.` : "Their specifications are equal.";
  const table = byId("compare-differences");
  table.tHead.replaceChildren(el("tr", {}, el("th", { scope: "col" }, "field"), ...shown.map((id) => el("th", { scope: "col" }, id))));
  table.tBodies[0].replaceChildren(
    ...(shown.length < 2 ? [] : paths.sort()).map((path) => el("tr", {}, el("th", { scope: "row" }, path), ...fields.map((one) => el("td", {}, one.get(path) ?? "not given")))),
  );
}
