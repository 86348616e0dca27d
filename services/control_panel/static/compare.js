// Comparisons: evaluations over the versions of a job's policies, and jobs with one another.
import { Chart, MetricTable, curves } from "./charts.js";
import { api, byId, changed, colour, el, inBrackets, number } from "./dom.js";

// --- evaluations over versions ------------------------------------------------------------------

const SCORE = /^(evaluation|evaluations\/[\w-]+)\/(pass@\d+|maj@\d+|team\/mean|reward\/[\w-]+\/mean)$/;
const SHORT = /^evaluations?\/((?:[\w-]+\/)?(?:(?:pass|maj)@\d+|team(?=\/mean)|reward\/[\w-]+(?=\/mean)))(?:\/mean)?$/;
const chart = new Chart(byId("chart-evaluation"), { spans: true });
const MOST_ROWS = 50;

// Returns whether a metric is shown among evaluations.
export const ofEvaluations = (name) => SHORT.test(name.replace(/\/(low|high)$/, "")) || /^evaluations?\/(?:[\w-]+\/)?version\//.test(name);

// table: the metrics of evaluations; spec: the job's specification, null until it is known.
export function drawEvaluations(table, spec) {
  const series = table.series(SHORT).map((one) => {
    const bounds = table.columns.has(`${one.metric}/low`);
    return bounds ? { ...one, low: table.column(`${one.metric}/low`), high: table.column(`${one.metric}/high`) } : one;
  });
  byId("evaluation-card").hidden = !series.length;
  chart.draw(table.steps, series);
  const sets = new Map();
  for (const name of table.columns.keys()) {
    const found = name.match(SCORE);
    if (found) sets.set(found[1], [...(sets.get(found[1]) ?? []), found[2]]);
  }
  if (!changed(byId("evaluations"), [table.steps.length, table.steps.at(-1), [...sets], spec?.checkpoint?.best])) return;
  byId("evaluations").replaceChildren(...[...sets].sort().map(([prefix, scores]) => evaluationTable(table, prefix, scores, spec?.checkpoint?.best)));
}

function evaluationTable(table, prefix, scores, kept) {
  const order = (name) => [name.startsWith("pass") ? 0 : name.startsWith("maj") ? 1 : name.startsWith("team") ? 2 : 3, Number(name.match(/@(\d+)/)?.[1] ?? 0)];
  scores.sort((a, b) => order(a)[0] - order(b)[0] || order(a)[1] - order(b)[1] || a.localeCompare(b));
  const columns = scores.map((name) => {
    const metric = `${prefix}/${name}`;
    const values = table.column(metric);
    const least = kept?.metric === metric && kept.mode === "min";
    let best = -1;
    values.forEach((value, i) => {
      if (value !== null && (best < 0 || (least ? value < values[best] : value > values[best]))) best = i;
    });
    return { name, metric, values, best, low: table.columns.get(`${metric}/low`), high: table.columns.get(`${metric}/high`) };
  });
  const versions = [...table.columns.keys()].filter((name) => name.startsWith(`${prefix}/version/`)).sort();
  const rows = [];
  let older = 0;
  for (let i = table.steps.length - 1; i >= 0; i -= 1) {
    if (columns.every((one) => one.values[i] === null)) continue;
    if (rows.length >= MOST_ROWS && !columns.some((one) => one.best === i)) {
      older += 1;
      continue;
    }
    const of = versions.map((name) => [name.split("/").at(-1), table.column(name)[i]]).filter(([, version]) => version !== null);
    const cells = columns.map((one) => score(one, i));
    const bests = columns.some((one) => one.best === i);
    rows.push(el("tr", { class: bests ? "best" : "" }, el("th", { scope: "row" }, String(table.steps[i])), el("td", {}, of.map(([policy, version]) => `${policy}@${version}`).join(" ") || "–"), ...cells));
  }
  const title = prefix === "evaluation" ? "held-out tasks" : prefix.split("/")[1];
  const head = columns.map((one) => el("th", { scope: "col" }, one.name.replace("/mean", ""), one.metric === kept?.metric ? el("small", {}, " keeps the best checkpoint") : null));
  return el(
    "div",
    {},
    el("h3", {}, title),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Evaluations of ${title}` }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "after step"), el("th", { scope: "col" }, "versions"), ...head)), el("tbody", {}, ...rows))),
    older ? el("p", { class: "muted" }, `${older} older ones are in the chart.`) : null,
  );
}

function score(one, i) {
  const value = one.values[i];
  if (value === null || value === undefined) return el("td", {}, "–");
  const sure = one.low?.[i] === undefined || one.low[i] === null ? null : el("small", {}, ` ${inBrackets(one.low[i], one.high[i])}`);
  return el("td", {}, one.best === i ? el("strong", {}, number(value), " ", el("span", { class: "pill on" }, "best")) : number(value), sure);
}

// --- jobs ------------------------------------------------------------------------------------------

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
  const fits = jobs.filter((job) => chosen.has(job.job_id) || `${job.job_id} ${job.name} ${job.state} ${job.mode}`.toLowerCase().includes(wanted)).slice(0, MOST_SHOWN);
  if (!changed(byId("compare-jobs"), [fits.map((job) => [job.job_id, job.state]), [...chosen]])) return;
  byId("compare-jobs").replaceChildren(
    ...fits.map((job) =>
      el(
        "label",
        {},
        el("input", { type: "checkbox", value: job.job_id, checked: chosen.has(job.job_id) ? "" : null, onchange: (event) => choose(job.job_id, event.target.checked) }),
        el("i", { class: "swatch", "--swatch": colour(job.job_id), "aria-hidden": "true" }),
        job.job_id,
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
  jobsChart.draw(steps, series);
  byId("compare-values").tBodies[0].replaceChildren(
    ...found.map(([id, table]) => {
      const values = table.column(metric).filter((value) => value !== null);
      const job = known.find((one) => one.job_id === id);
      let [least, most] = [Infinity, -Infinity];
      for (const value of values) [least, most] = [Math.min(least, value), Math.max(most, value)];
      return el("tr", {}, el("th", { scope: "row" }, id), ...[job?.state ?? "–", String(table.steps.at(-1)), number(values.at(-1)), number(least), number(most)].map((text) => el("td", {}, text)));
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
