// Wires the page to the REST interface: one stream for the cluster, one for the chosen job.
import { Chart, MetricTable, chartControls, curves, redrawCharts } from "./charts.js";
import { drawDevices, drawEngines, drawFunctions, drawPolicies, drawServices, drawSettings } from "./cluster.js";
import { setCast } from "./colours.js";
import { compareJobs, drawJobChoice } from "./compare.js";
import { advice, api, apiPage, byId, changed, duration, el, firstLine, folded, inBrackets, moment, number, toast } from "./dom.js";
import { drawEvaluations, evaluationTiles, ofEvaluations } from "./evaluations.js";
import { openForm } from "./form.js";
import { goOn } from "./goingon.js";
import { drawHosts, drawJobHosts } from "./hosts.js";
import { drawJobTable } from "./jobs.js";
import { planFor } from "./plan.js";
import { drawPopulation } from "./population.js";
import { drawTeam, ofTeam } from "./team.js";
import { Viewer, audit, drawSamples } from "./trajectories.js";

const TERMINAL = ["succeeded", "failed", "cancelled"];
const QUEUE_POINTS = 240;
const LOG_LINES = 300;
const DRAW_MS = 200;
const REWARD = /^(?:reward\/)?((?!reward\b|eval\b|staleness\b)[\w-]+)\/mean$/;
const THROUGHPUT = /^rollout\/(tokens_per_second)$/;
const LOSS = /^([\w-]+)\/loss\/policy$/;
const SECONDS = "step/seconds";
// Of a policy's updates, each with a small chart: metric, title, unit or explanation.
const MULTIPLES = [
  ["entropy", "Entropy", "nats per token"],
  ["kl", "KL", "to the reference policy"],
  ["k3_kl", "Mismatch KL", "to the policy that sampled"],
  ["clip_fraction", "Clip fraction", "of tokens"],
  ["response_length/mean", "Response length", "tokens, mean"],
  ["grad_norm", "Gradient norm", ""],
].map(([metric, title, about]) => {
  const place = el("div", { class: "chart" });
  const card = el("article", { class: "card", "data-metric": metric }, el("h2", {}, `${title} `, el("small", {}, about)), place);
  byId("multiples").append(card);
  return { pattern: new RegExp(`^([\\w-]+)/${metric}$`), card, chart: new Chart(place) };
});
const IDLE = ["skipped", "samples", "no_signal"];
const drawnOf = (name) => [REWARD, THROUGHPUT, LOSS, ...MULTIPLES.map((one) => one.pattern)].some((pattern) => pattern.test(name)) || name === SECONDS || IDLE.includes(name.split("/").at(-1)) || ofEvaluations(name) || ofTeam(name);
// Metrics of this many recent steps come with the stream; the drawn ones of earlier steps come as columns.
const RECENT = 64;

const charts = {
  reward: new Chart(byId("chart-reward")),
  throughput: new Chart(byId("chart-throughput")),
  queue: new Chart(byId("chart-queue"), { x: "time" }),
  loss: new Chart(byId("chart-loss")),
};
const viewer = new Viewer();
let chosen = new URLSearchParams(location.search).get("job");
let stream = null;
// Steps of training and evaluations have tables of their own: neither makes gaps in the other.
let training = new MetricTable();
let evaluations = new MetricTable();
let queue = [];
let job = null;
// The chosen job's specification; null until it is known.
let spec = null;

// --- views ----------------------------------------------------------------------------------

const VIEWS = [...document.querySelectorAll("main[data-view]")].map((node) => node.dataset.view);
const view = () => (VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "run");

function showView() {
  for (const node of document.querySelectorAll("main[data-view]")) node.hidden = node.dataset.view !== view();
  for (const link of document.querySelectorAll("#views a")) {
    if (link.getAttribute("href") === `#${view()}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  redrawCharts();
  if (view() === "run") drawCharts();
  refresh();
  if (view() === "new") openForm();
}
addEventListener("hashchange", showView);

// Data that is not streamed is requested when it is shown.
function refresh() {
  const ignore = () => {};
  if (view() === "cluster") {
    drawFunctions().catch(ignore);
    drawHosts().catch(ignore);
  }
  if (view() === "run" && job) drawJobHosts(job).catch(ignore);
  if (view() === "compare") compareJobs().catch((error) => (byId("compare-problem").textContent = error.message));
  if (!chosen) return;
  // Colours of agents need the specification.
  if (view() === "conversations" && spec) {
    viewer.refresh(chosen).catch(ignore);
    drawSamples(chosen, job?.state === "succeeded").catch(ignore);
  }
  if (spec) drawPopulation(chosen, Boolean(spec.population), watchMatch).catch(ignore);
}

// --- the chosen job -------------------------------------------------------------------------

let drawing = false;
let drawn = 0;
// At most every DRAW_MS: a log of thousands of steps arrives faster than it can be drawn.
function drawCharts() {
  if (drawing) return;
  drawing = true;
  setTimeout(() => requestAnimationFrame(drawNow), drawn + DRAW_MS - performance.now());
}

function drawNow() {
  drawing = false;
  if (view() === "run") {
    const began = performance.now();
    const seconds = training.secondsAt(SECONDS);
    charts.reward.draw(training.steps, training.series(REWARD), seconds);
    charts.throughput.draw(training.steps, training.series(THROUGHPUT).map((one) => ({ ...one, name: "tokens/s" })), seconds);
    performance.measure("troupe-charts", { start: began });
    // In a separate frame: drawing everything at once would block the page.
    requestAnimationFrame(drawOthers);
  }
}

function drawOthers() {
  const began = performance.now();
  const seconds = training.secondsAt(SECONDS);
  charts.loss.draw(training.steps, training.series(LOSS).map(withGaps), seconds);
  for (const { pattern, card, chart } of MULTIPLES) {
    const series = training.series(pattern).map(withGaps);
    card.hidden = !series.length;
    chart.draw(training.steps, series, seconds);
  }
  drawEvaluations(evaluations, training.secondsAt(SECONDS, evaluations.steps), spec);
  drawTeam(training, evaluations, (table) => training.secondsAt(SECONDS, table.steps));
  drawGaps();
  performance.measure("troupe-charts", { start: began });
  drawn = performance.now();
}

// Returns whether a policy made no update in the step at an index: it has no loss then, not the previous one.
function idle(policy) {
  const [skipped, samples, flat] = IDLE.map((name) => training.column(`${policy}/${name}`));
  return (i) => skipped[i] === 1 || samples[i] === 0 || flat[i] === 1;
}

function withGaps(one) {
  const none = idle(one.name);
  return { ...one, values: one.values.map((value, i) => (none(i) ? null : value)) };
}

function drawGaps() {
  const counts = training.series(LOSS).map(({ name }) => {
    const none = idle(name);
    return [name, training.steps.reduce((count, _, i) => count + none(i), 0)];
  });
  const told = counts.filter(([, count]) => count).map(([name, count]) => `${name} ${count}`);
  byId("gaps").textContent = told.length ? `gaps: steps without an update (${told.join(", ")})` : "";
}

const withInterval = ([value, bounds]) =>
  el("span", { class: "score" }, number(value), bounds ? el("small", {}, ` ${inBrackets(bounds.low, bounds.high)}`) : null);

function drawTiles() {
  const m = job.metrics;
  const tiles = [
    ["step", `${job.step} / ${job.total_steps}`, eta()],
    ["tokens/s", number(m["rollout/tokens_per_second"])],
    ["seconds/step", number(m["step/seconds"])],
  ];
  tiles.push(...evaluationTiles(job, spec?.checkpoint?.best));
  if (!changed(byId("tiles"), tiles)) return;
  byId("tiles").replaceChildren(
    ...tiles.map(([label, value, extra]) =>
      el(
        "div",
        { class: "tile" },
        el("b", {}, ...(Array.isArray(value) ? value.flatMap((one, i) => [i ? " → " : null, withInterval(one)]) : [value])),
        el("span", {}, label, " "),
        typeof extra === "number"
          ? el("i", { class: extra < 0 ? "down" : "" }, `${extra >= 0 ? "+" : ""}${number(extra)}`)
          : extra ? el("i", {}, extra) : null,
      )),
  );
}

function eta() {
  const per = job.metrics["step/seconds"];
  if (!per || TERMINAL.includes(job.state)) return null;
  return `≈ ${duration(per * (job.total_steps - job.step))} left`;
}

function drawJob() {
  if (!job) return;
  document.title = `${job.name} · Troupe`;
  const state = byId("job-state");
  state.textContent = job.state;
  state.className = `pill ${job.state}`;
  byId("activity").textContent = job.problem ? firstLine(problemText(job.problem)) : job.early_end ? `${TERMINAL.includes(job.state) ? "ended" : "ends"} early: ${job.early_end.text}` : job.activity;
  drawProblem(job.problem);
  drawNotes(job);
  drawHistory(job.history);
  const done = (100 * job.step) / Math.max(1, job.total_steps);
  byId("progress-bar").style.width = `${done}%`;
  byId("progress").setAttribute("aria-valuenow", String(Math.round(done)));
  const can = {
    pause: ["submitted", "starting", "running"].includes(job.state),
    resume: ["paused", "failed", "cancelled"].includes(job.state),
    "go-on": ["paused", ...TERMINAL].includes(job.state),
    cancel: !TERMINAL.includes(job.state),
  };
  for (const [action, enabled] of Object.entries(can)) {
    document.querySelector(`[data-action=${action}]`).disabled = !enabled;
  }
  // A job that has succeeded goes on with more steps only.
  document.querySelector("[data-action=go-on]").textContent = job.state === "succeeded" ? "More steps …" : "Resume with …";
  byId("split-hint").textContent = job.split_hint;
  byId("split-hint").hidden = !job.split_hint;
  drawTiles();
}

function problemText(problem) {
  const field = problem.field ? `${problem.field}: ` : "";
  return `${field}${advice(problem.message, problem.remedy)}`;
}

// The whole reason of a failure, folded, and its remedy.
function drawProblem(problem) {
  const place = byId("job-problem");
  place.hidden = !problem;
  if (!changed(place, problem) || !problem) return;
  const reason = folded(`${problem.field ? `${problem.field}: ` : ""}${problem.message}`);
  place.replaceChildren(reason, problem.remedy ? el("p", { class: "remedy" }, problem.remedy) : "");
}

// What was changed of the specification when the job was resumed.
function drawHistory(changes) {
  const place = byId("spec-history");
  if (!changed(place, changes)) return;
  byId("spec-changes").textContent = changes.length ? `changed ${changes.length === 1 ? "once" : `${changes.length} times`} when the job was resumed` : "";
  const said = ({ field, old, new: value }) => `${field}: ${old || "none"} → ${value || "none"}`;
  place.replaceChildren(...changes.map((one) => el("li", {}, `after step ${one.step}, ${moment(new Date(one.at))}: ${one.fields.map(said).join("; ")}`)));
}

function drawNotes({ tags, notes }) {
  const place = byId("job-notes");
  place.hidden = !tags.length && !notes;
  if (changed(place, [tags, notes])) place.replaceChildren(...tags.map((tag) => el("span", { class: "tag" }, tag)), notes ? folded(notes) : "");
}

function log(text, severity, at) {
  const list = byId("log");
  const time = el("time", {}, new Date(at ?? Date.now()).toLocaleTimeString());
  list.prepend(el("li", { class: severity }, time, folded(text)));
  while (list.children.length > LOG_LINES) list.lastChild.remove();
}

function choose(id) {
  if (stream && chosen === id) return;
  stream?.close();
  chosen = id;
  training = new MetricTable();
  evaluations = new MetricTable();
  job = null;
  spec = null;
  shut(byId("specification"));
  setCast(null);
  byId("log").replaceChildren();
  const query = new URLSearchParams(location.search);
  query.set("job", id);
  history.replaceState(null, "", `?${query}${location.hash}`);
  byId("job-select").value = id;
  api(`/api/jobs/${encodeURIComponent(id)}`).then((found) => {
    if (id !== chosen) return;
    spec = JSON.parse(found.spec);
    setCast(spec);
    job ??= found;
    drawJob();
    drawCharts();
    refresh();
    return readCurves(id, Object.keys(found.metrics).filter(drawnOf));
  }).catch((error) => toast(error.message));
  stream = new EventSource(`/api/jobs/${encodeURIComponent(id)}/events?recent_metrics=${RECENT}`);
  const on = (name, handle) => stream.addEventListener(name, (event) => handle(JSON.parse(event.data)));
  on("metrics", (row) => {
    const [trained, evaluated] = byKind(row.values);
    if (Object.keys(trained).length) training.add(row.step, trained);
    if (Object.keys(evaluated).length) evaluations.add(row.step, evaluated);
    drawCharts();
  });
  on("notice", (notice) => log(notice.text, notice.severity, notice.at));
  on("state", (state) => log(state.problem ? `${state.state}: ${problemText(state.problem)}` : state.state, state.state === "failed" ? "error" : "info", state.at));
  on("activity", (activity) => (byId("activity").textContent = activity.text));
  on("end", () => stream.close());
  on("problem", (problem) => {
    log(problem.detail, "error", new Date().toISOString());
    stream.close();
  });
  viewer.forget(id);
  drawCharts();
}

// --- the job's own file ----------------------------------------------------------------------

function shut(details) {
  details.open = false;
  details.removeAttribute("data-read");
}

// Read when it is opened: it may be long, and few look at it.
async function drawSpecification() {
  const place = byId("specification");
  const id = chosen;
  if (!place.open || !id || place.dataset.read === id) return;
  const found = await api(`/api/jobs/${encodeURIComponent(id)}/specification`);
  if (id !== chosen) return;
  place.dataset.read = id;
  byId("given-spec").textContent = found.given || "It is not known: the job is of an earlier release.";
  byId("resolved-spec").textContent = found.resolved;
}
byId("specification").addEventListener("toggle", () => drawSpecification().catch((error) => toast(error.message)));

// Steps of training, and steps of evaluations.
function byKind(values) {
  const parts = [{}, {}];
  for (const [name, value] of Object.entries(values)) parts[Number(name.startsWith("evaluation"))][name] = value;
  return parts;
}

// The steps before the streamed ones: only the metrics that are drawn.
async function readCurves(id, names) {
  const began = performance.now();
  if (names.length) {
    for await (const page of curves(id, names)) {
      if (id !== chosen) return;
      const [trained, evaluated] = byKind(page.columns);
      training.merge(page.steps, trained);
      evaluations.merge(page.steps, evaluated);
      drawCharts();
    }
  }
  performance.measure("troupe-history", { start: began });
}

function watchMatch(id) {
  location.hash = "#conversations";
  viewer.open(id).catch((error) => toast(error.message));
}

// --- the cluster ----------------------------------------------------------------------------

// Jobs that the stream does not send: older ones, fetched on demand.
const OLDER = " older";
let older = [];
let olderPage;

async function fetchOlder() {
  const [found, next] = await apiPage(`/api/jobs?limit=200&page=${encodeURIComponent(olderPage)}`);
  older.push(...found);
  olderPage = next;
}

function drawJobs(newest, nextPage) {
  if (!older.length) olderPage = nextPage;
  const told = new Set(newest.map((item) => item.job_id));
  const jobs = [...newest, ...older.filter((item) => !told.has(item.job_id))];
  const select = byId("job-select");
  const shown = jobs.map((item) => `${item.job_id} (${item.state})`);
  if (olderPage) shown.push("older jobs ...");
  if (shown.join() !== select.dataset.shown) {
    select.dataset.shown = shown.join();
    select.replaceChildren(...shown.map((text, i) => el("option", { value: jobs[i]?.job_id ?? OLDER }, text)));
    if (chosen) select.value = chosen;
  }
  if (!chosen && jobs.length) choose(jobs[0].job_id);
  else if (chosen && !stream) choose(chosen);
  job = jobs.find((item) => item.job_id === chosen) ?? job;
  if (view() === "compare") drawJobChoice(jobs, chosen);
  if (view() === "jobs") drawJobTable(jobs, showJob);
}

function showJob(id) {
  location.hash = "#run";
  choose(id);
}

function drawQueue(cluster) {
  const engines = cluster.engines.filter((engine) => engine.job_id === chosen);
  const values = { "in flight": cluster.in_flight[chosen] ?? 0 };
  const of = { "in flight": "" };
  for (const engine of engines) {
    values[`${engine.policy} waiting`] = (values[`${engine.policy} waiting`] ?? 0) + engine.waiting;
    values[`${engine.policy} running`] = (values[`${engine.policy} running`] ?? 0) + engine.running;
  }
  for (const policy of Object.keys(spec?.policies ?? {})) for (const doing of ["waiting", "running"]) of[`${policy} ${doing}`] = policy;
  queue.push({ x: Date.now() / 1000, values });
  queue = queue.slice(-QUEUE_POINTS);
  const names = [...new Set(queue.flatMap((row) => Object.keys(row.values)))];
  charts.queue.draw(queue.map((row) => row.x), names.map((name) => ({ name, of: of[name], values: queue.map((row) => row.values[name] ?? null) })));
}

function live(text, on) {
  const node = byId("live");
  node.textContent = text;
  node.className = `pill ${on ? "on" : "off"}`;
}

const cluster = new EventSource("/api/cluster/events");
cluster.addEventListener("cluster", (event) => {
  const began = performance.now();
  const data = JSON.parse(event.data);
  live("live", true);
  drawJobs(data.jobs, data.next_page);
  if (view() === "cluster") {
    drawServices(data.cluster);
    drawDevices(data.cluster);
    drawEngines(data.cluster.engines, chosen);
  }
  if (job) {
    drawPolicies(job, data.cluster.bindings);
    drawSettings(job);
  }
  drawJob();
  drawQueue(data.cluster);
  performance.measure("troupe-cluster", { start: began });
});
cluster.addEventListener("away", (event) => live(JSON.parse(event.data).message, false));
cluster.onerror = () => {
  live("panel away", false);
  // Refused for lack of a session rather than unreachable: a call returns that problem with its remedy.
  if (cluster.readyState === EventSource.CLOSED) api("/api/cluster").catch((error) => live(error.message, false));
};
setInterval(refresh, 4000);

// --- user input ------------------------------------------------------------------------------

byId("job-select").addEventListener("change", (event) => {
  if (event.target.value !== OLDER) return choose(event.target.value);
  event.target.value = chosen;
  fetchOlder().catch((error) => toast(error.message));
});
// Reads the chosen job anew, and its stream, which had ended.
function follow() {
  stream?.close();
  stream = null;
  choose(chosen);
}
addEventListener("resumed", (event) => {
  toast(`resume: ${event.detail.state}`);
  if (event.detail.job_id === chosen) follow();
});
byId("actions").addEventListener("click", async (event) => {
  const action = event.target.dataset.action;
  if (!action || !chosen) return;
  if (action === "go-on") return goOn(job).catch((error) => toast(error.message));
  if (action === "cancel" && !confirm(`Cancel ${chosen}? Checkpoints and metrics stay.`)) return;
  try {
    job = await api(`/api/jobs/${encodeURIComponent(chosen)}/${action}`, { method: "POST" });
    drawJob();
    toast(`${action}: ${job.state}`);
    if (action === "resume") follow();
  } catch (error) {
    toast(error.message);
  }
});
byId("audit").addEventListener("click", () => chosen && audit(chosen).catch((error) => toast(error.message)));
byId("plan-form").addEventListener("submit", (event) => {
  event.preventDefault();
  planFor(chosen, spec);
});
byId("submit-copy").addEventListener("click", () => openForm(spec));
addEventListener("submitted", (event) => {
  showJob(event.detail);
  toast(`submitted ${event.detail}`);
});
addEventListener("forgotten", (event) => {
  older = older.filter((item) => item.job_id !== event.detail);
  // The page of a deleted job begins anew, with the newest job.
  if (event.detail === chosen) location.replace("/#jobs");
});
addEventListener("annotated", (event) => {
  older = older.map((item) => (item.job_id === event.detail.job_id ? event.detail : item));
});
// Single keys, outside of input fields.
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
  if (/^[1-9]$/.test(event.key)) {
    const link = [...document.querySelectorAll("#views a:not([hidden])")][Number(event.key) - 1];
    if (link) link.click();
  } else if (view() === "conversations") {
    viewer.onKey(event);
  }
});
chartControls();
showView();
