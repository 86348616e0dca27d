// The utilization of the cluster's hosts: a row of small charts per host on the page of the cluster,
// and charts over the time of a job on its page.
import { Chart } from "./charts.js";
import { api, byId, changed, el } from "./dom.js";

// Field, title, explanation.
const FIGURES = [
  ["cpu", "CPU", "of the cores"],
  ["memory", "Memory", "in use"],
  ["gpu", "GPU", "mean over a host's GPUs"],
  ["gpu_memory", "GPU memory", "in use"],
];
// Rows of measurements come this often.
const PERIOD_MS = 10_000;
const POINTS = 120;
// Of more hosts than this, the charts show the mean, with the least and the most.
const MOST_LINES = 8;
const [WIDTH, HEIGHT] = [160, 30];
const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`);
const some = (values) => values.some((value) => value !== null);

// Reads the utilization of all hosts between two times (Date, or null for now).
function read(since, until, points) {
  const query = new URLSearchParams({ since: since.toISOString(), points });
  if (until) query.set("until", until.toISOString());
  return api(`/api/cluster/utilization?${query}`);
}

// Inserts a place without values where measurements are missing for long, so that no line bridges it.
function withGaps({ times, hosts }) {
  const steps = times.slice(1).map((time, i) => time - times[i]).sort((a, b) => a - b);
  const long = 2.5 * Math.max(PERIOD_MS / 1000, steps[Math.floor(steps.length / 2)] ?? 0);
  const before = times.map((time, i) => i > 0 && time - times[i - 1] > long);
  const widened = (values, gap) => values.flatMap((value, i) => (before[i] ? [gap(i), value] : [value]));
  const columns = (host) => Object.fromEntries(FIGURES.map(([field]) => [field, widened(host[field], () => null)]));
  return { times: widened(times, (i) => (times[i - 1] + times[i]) / 2), hosts: hosts.map((host) => ({ host: host.host, ...columns(host) })) };
}

// --- the page of the cluster ------------------------------------------------------------------

let reading = 0;
let asked = "";
let due = 0;

// Draws the table of hosts; asks for new values no more often than they are measured.
export async function drawHosts() {
  const hours = Number(byId("hosts-range").value);
  if (asked === String(hours) && performance.now() < due) return;
  [asked, due] = [String(hours), performance.now() + PERIOD_MS];
  reading += 1;
  const mine = reading;
  const until = new Date();
  const since = new Date(until - 3_600_000 * hours);
  const found = withGaps(await read(since, null, POINTS));
  // Another range was chosen meanwhile.
  if (mine !== reading) return;
  const shown = FIGURES.filter(([field]) => field === "cpu" || field === "memory" || found.hosts.some((host) => some(host[field])));
  const table = byId("hosts");
  if (changed(table.tHead, shown)) table.tHead.replaceChildren(el("tr", {}, el("th", { scope: "col" }, "host"), ...shown.map(([, title, about]) => el("th", { scope: "col" }, title, el("small", {}, ` ${about}`)))));
  const across = [since / 1000, until / 1000];
  table.tBodies[0].replaceChildren(
    ...found.hosts.map((host) => el("tr", {}, el("th", { scope: "row" }, host.host), ...shown.map(([field, title]) => el("td", { "data-title": title }, some(host[field]) ? spark(found.times, host[field], across, `${title} of ${host.host}`) : "–")))),
  );
}

// A small chart of fractions, from 0 to 100 %, with the newest value next to it.
function spark(times, values, [first, last], title) {
  const known = values.filter((value) => value !== null);
  const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
  const text = `${title}: now ${percent(values.at(-1))}, mean ${percent(mean)}, most ${percent(Math.max(...known))}`;
  const shape = (name, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const svg = shape("svg", { width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": text, class: "spark" });
  const at = (i) => `${((WIDTH * (times[i] - first)) / (last - first)).toFixed(1)},${(HEIGHT - 1 - (HEIGHT - 2) * values[i]).toFixed(1)}`;
  let run = [];
  for (let i = 0; i <= values.length; i += 1) {
    if (i < values.length && values[i] !== null) {
      run.push(i);
      continue;
    }
    if (run.length) {
      const [from, to] = [run[0], run.at(-1)].map((one) => at(one).split(",")[0]);
      const points = run.map(at).join(" ");
      svg.append(shape("polygon", { points: `${from},${HEIGHT} ${points} ${to},${HEIGHT}` }), shape("polyline", { points }));
    }
    run = [];
  }
  return el("span", { class: "figure", title: text }, svg, el("b", {}, percent(values.at(-1))));
}

byId("hosts-range").addEventListener("change", () => drawHosts().catch(() => {}));

// --- the page of a job ------------------------------------------------------------------------

const charts = FIGURES.map(([field, title, about]) => {
  const place = el("div", { class: "chart" });
  const card = el("article", { class: "card", "data-figure": field }, el("h2", {}, `${title} `, el("small", {}, `% ${about}`)), place);
  byId("job-hosts-charts").append(card);
  return { field, card, chart: new Chart(place, { x: "time", range: [0, 100] }) };
});
let drawnFor = "";
let drawnAt = -Infinity;

// Draws what the hosts did while a job ran; of an ended job once.
export async function drawJobHosts(job) {
  const key = `${job.job_id} ${job.started_at} ${job.ended_at}`;
  if (key === drawnFor && (job.ended_at || performance.now() < drawnAt + PERIOD_MS)) return;
  [drawnFor, drawnAt] = [key, performance.now()];
  const until = job.ended_at ? new Date(job.ended_at) : null;
  // At least one row of measurements.
  const since = job.started_at ? new Date(Math.min(Date.parse(job.started_at), (until ?? Date.now()) - PERIOD_MS)) : null;
  const found = since ? withGaps(await read(since, until, 2 * POINTS)) : { times: [], hosts: [] };
  if (drawnFor !== key) return;
  byId("job-hosts").hidden = !found.times.length;
  byId("job-hosts-about").textContent = found.hosts.length > MOST_LINES ? `${found.hosts.length} hosts while this job ran: the mean, with the least and the most` : "every host of the cluster while this job ran";
  for (const { field, card, chart } of charts) {
    const hosts = found.hosts.filter((host) => some(host[field]));
    card.hidden = !hosts.length;
    if (hosts.length) chart.draw(found.times, hosts.length > MOST_LINES ? [summed(hosts, field)] : hosts.map((host) => ({ name: host.host, values: host[field].map((value) => (value === null ? null : 100 * value)) })));
  }
}

// The mean over hosts, with the least and the most as its bounds.
function summed(hosts, field) {
  const of = (pick) => hosts[0][field].map((_, i) => {
    const known = hosts.map((host) => host[field][i]).filter((value) => value !== null);
    return known.length ? 100 * pick(known) : null;
  });
  const mean = of((known) => known.reduce((sum, value) => sum + value, 0) / known.length);
  return { name: `mean of ${hosts.length} hosts`, values: mean, low: of((known) => Math.min(...known)), high: of((known) => Math.max(...known)) };
}
