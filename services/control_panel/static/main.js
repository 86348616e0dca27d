// Wires the page to the REST interface: one stream for the cluster, one for the chosen job.
import { Chart } from "./charts.js";
import { drawDevices, drawEngines, drawPolicies, drawServices } from "./cluster.js";
import { advice, api, apiPage, byId, duration, el, number, toast } from "./dom.js";
import { drawFunctions } from "./functions.js";
import { drawPopulation } from "./population.js";
import { audit, drawSamples } from "./samples.js";
import { Viewer } from "./trajectories.js";

const TERMINAL = ["succeeded", "failed", "cancelled"];
const QUEUE_POINTS = 240;
const LOG_LINES = 300;

const charts = {
  reward: new Chart(byId("chart-reward")),
  evaluation: new Chart(byId("chart-evaluation")),
  throughput: new Chart(byId("chart-throughput")),
  queue: new Chart(byId("chart-queue"), { x: "time" }),
  loss: new Chart(byId("chart-loss")),
  grad: new Chart(byId("chart-grad")),
};
const viewer = new Viewer();
let chosen = new URLSearchParams(location.search).get("job");
let stream = null;
let rows = [];
let queue = [];
let job = null;

// --- the chosen job -------------------------------------------------------------------------

function names(pattern) {
  const found = new Set();
  for (const row of rows) for (const name of Object.keys(row.values)) if (pattern.test(name)) found.add(name);
  return [...found].sort();
}

// Series under short names: what the pattern's first group matched.
function series(pattern) {
  const full = names(pattern);
  const short = full.map((name) => name.match(pattern)[1] ?? name);
  const data = rows
    .map((row) => ({
      x: row.step,
      values: Object.fromEntries(full.map((name, i) => [short[i], row.values[name]]).filter(([, v]) => v !== undefined)),
    }))
    .filter((row) => Object.keys(row.values).length);
  return [data, short];
}

let drawing = false;
function drawCharts() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    charts.reward.draw(...series(/^(?:reward\/)?((?!reward\b|eval\b|staleness\b)[\w-]+)\/mean$/));
    charts.evaluation.draw(...series(/^evaluations?\/((?:[\w-]+\/)?(?:(?:pass|maj)@\d+|team(?=\/mean)|reward\/[\w-]+(?=\/mean)))(?:\/mean)?$/));
    charts.throughput.draw(...series(/^rollout\/(tokens_per_second)$/));
    charts.loss.draw(...series(/^([\w-]+)\/loss\/policy$/));
    charts.grad.draw(...series(/^([\w-]+)\/grad_norm$/));
  });
}

// The newest held-out value of what `before` and `after` call `name`.
function heldOut(name) {
  const named = /^(?!reward\/)[^/]+\//.test(name);  // of a named evaluation: gsm8k/pass@1
  const mean = /(^|\/)reward\/[^/]+$/.test(name) ? `${name}/mean` : name.replace(/team_success$/, "team/mean");
  const metric = `${named ? "evaluations" : "evaluation"}/${mean}`;
  return job.after[name] ?? job.metrics[metric] ?? job.before[name];
}

function drawTiles() {
  const m = job.metrics;
  const tiles = [
    ["step", `${job.step} / ${job.total_steps}`, eta()],
    ["tokens/s", number(m["rollout/tokens_per_second"])],
    ["seconds/step", number(m["step/seconds"])],
  ];
  for (const [name, value] of Object.entries(job.before)) {
    const now = heldOut(name);
    const label = `held-out ${name.replace("_", " ")}`;
    tiles.push(now === value ? [label, number(value)] : [label, `${number(value)} → ${number(now)}`, now - value]);
  }
  byId("tiles").replaceChildren(
    ...tiles.map(([label, value, extra]) =>
      el(
        "div",
        { class: "tile" },
        el("b", {}, value),
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
  byId("activity").textContent = job.problem ? problemText(job.problem) : job.activity;
  byId("progress-bar").style.width = `${(100 * job.step) / Math.max(1, job.total_steps)}%`;
  const can = {
    pause: ["submitted", "starting", "running"].includes(job.state),
    resume: ["paused", "failed", "cancelled"].includes(job.state),
    cancel: !TERMINAL.includes(job.state),
  };
  for (const [action, enabled] of Object.entries(can)) {
    document.querySelector(`[data-action=${action}]`).disabled = !enabled;
  }
  drawTiles();
}

function problemText(problem) {
  const field = problem.field ? `${problem.field}: ` : "";
  return `${field}${advice(problem.message, problem.remedy)}`;
}

function log(text, severity, at) {
  const list = byId("log");
  const time = el("time", {}, new Date(at ?? Date.now()).toLocaleTimeString());
  list.prepend(el("li", { class: severity }, time, text));
  while (list.children.length > LOG_LINES) list.lastChild.remove();
}

function choose(id) {
  if (stream && chosen === id) return;
  stream?.close();
  chosen = id;
  rows = [];
  job = null;
  byId("log").replaceChildren();
  byId("conversation").replaceChildren(el("p", { class: "muted" }, "Choose a trajectory to read the conversation between the agents."));
  history.replaceState(null, "", `?job=${encodeURIComponent(id)}`);
  byId("job-select").value = id;
  stream = new EventSource(`/api/jobs/${encodeURIComponent(id)}/events`);
  const on = (name, handle) => stream.addEventListener(name, (event) => handle(JSON.parse(event.data)));
  on("metrics", (row) => {
    rows.push(row);
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
  viewer.refresh(id).catch(() => {});
  drawSamples(id).catch(() => {});
  drawPopulation(id, watchMatch).catch(() => {});
}

function watchMatch(id) {
  viewer.open(id).then(() => byId("conversation").scrollIntoView({ behavior: "smooth", block: "center" })).catch((error) => toast(error.message));
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
  const found = jobs.find((item) => item.job_id === chosen);
  if (chosen && !found && !job) api(`/api/jobs/${encodeURIComponent(chosen)}`).then((item) => (job = item)).catch(() => {});
  job = found ?? job;
}

function drawQueue(cluster) {
  const engines = cluster.engines.filter((engine) => engine.job_id === chosen);
  const values = { "in flight": cluster.in_flight[chosen] ?? 0 };
  for (const engine of engines) {
    values[`${engine.policy} waiting`] = (values[`${engine.policy} waiting`] ?? 0) + engine.waiting;
    values[`${engine.policy} running`] = (values[`${engine.policy} running`] ?? 0) + engine.running;
  }
  queue.push({ x: Date.now() / 1000, values });
  queue = queue.slice(-QUEUE_POINTS);
  charts.queue.draw(queue, [...new Set(queue.flatMap((row) => Object.keys(row.values)))]);
}

function live(text, on) {
  const node = byId("live");
  node.textContent = text;
  node.className = `pill ${on ? "on" : "off"}`;
}

const cluster = new EventSource("/api/cluster/events");
cluster.addEventListener("cluster", (event) => {
  const data = JSON.parse(event.data);
  live("live", true);
  drawJobs(data.jobs, data.next_page);
  drawServices(data.cluster);
  drawDevices(data.cluster);
  drawEngines(data.cluster.engines, chosen);
  if (job) drawPolicies(job, data.cluster.bindings);
  drawJob();
  drawQueue(data.cluster);
});
cluster.addEventListener("away", (event) => live(JSON.parse(event.data).message, false));
cluster.onerror = () => {
  live("panel away", false);
  // Refused for lack of a session rather than unreachable: a call returns that problem with its remedy.
  if (cluster.readyState === EventSource.CLOSED) api("/api/cluster").catch((error) => live(error.message, false));
};
setInterval(() => drawFunctions().catch(() => {}), 2000);
setInterval(() => {
  if (!chosen) return;
  viewer.refresh(chosen).catch(() => {});
  drawSamples(chosen).catch(() => {});
  drawPopulation(chosen, watchMatch).catch(() => {});
}, 4000);

// --- user input ------------------------------------------------------------------------------

byId("job-select").addEventListener("change", (event) => {
  if (event.target.value !== OLDER) return choose(event.target.value);
  event.target.value = chosen;
  fetchOlder().catch((error) => toast(error.message));
});
byId("actions").addEventListener("click", async (event) => {
  const action = event.target.dataset.action;
  if (!action || !chosen) return;
  if (action === "cancel" && !confirm(`Cancel ${chosen}? Checkpoints and metrics stay.`)) return;
  try {
    job = await api(`/api/jobs/${encodeURIComponent(chosen)}/${action}`, { method: "POST" });
    drawJob();
    toast(`${action}: ${job.state}`);
    if (action === "resume") {
      stream?.close();
      stream = null;
      choose(chosen);
    }
  } catch (error) {
    toast(error.message);
  }
});
byId("audit").addEventListener("click", () => chosen && audit(chosen).catch((error) => toast(error.message)));
byId("submit-open").addEventListener("click", () => byId("submit-dialog").showModal());
byId("submit-send").addEventListener("click", async (event) => {
  event.preventDefault();
  byId("submit-problem").textContent = "";
  try {
    const submitted = await api("/api/jobs", { method: "POST", headers: { "content-type": "application/yaml" }, body: byId("submit-spec").value });
    byId("submit-dialog").close();
    choose(submitted.job_id);
    toast(`submitted ${submitted.job_id}`);
  } catch (error) {
    byId("submit-problem").textContent = error.message;
  }
});
