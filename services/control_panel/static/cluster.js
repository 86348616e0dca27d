// The state of the cluster: services, devices, engines, policies, functions.
import { named } from "./colours.js";
import { api, byId, el, number } from "./dom.js";

const cell = (value) => el("td", {}, value ?? "–");
const pill = (state) => el("span", { class: `pill ${state}` }, state);

function tile(name, ok, state, ...lines) {
  return el(
    "div",
    { class: ok ? "service" : "service lost" },
    el("strong", {}, name, el("span", { class: `pill ${ok ? "serving" : "lost"}` }, state)),
    ...lines.filter(Boolean).map((line) => el("p", {}, line)),
  );
}

export function drawServices(cluster) {
  const services = cluster.services.map((s) =>
    tile(s.name, s.serving, s.serving ? "serving" : "away", s.message, s.address));
  const workers = cluster.workers.map((w) =>
    tile(
      `${w.kind} ${w.worker_id}`,
      w.alive,
      w.alive ? "serving" : "lost",
      w.doing || "idle",
      w.jobs.length ? `for ${w.jobs.join(", ")}` : "for no job",
      `${(w.rss_bytes / 2 ** 20).toFixed(0)} MiB · heartbeat ${w.seconds_since_heartbeat.toFixed(1)}s ago`,
    ));
  byId("services").replaceChildren(...services, ...workers);
}

// The engines that share a server or model, by its id.
function byHost(engines) {
  const found = new Map();
  for (const engine of engines) if (engine.host) found.set(engine.host, [...(found.get(engine.host) ?? []), engine]);
  return found;
}

// "@5 (and @4)": the version that serves, and older ones that running turns began with.
function versionsOf(engine) {
  const served = engine.version === null ? "–" : `@${engine.version}`;
  const others = engine.live_versions.filter((one) => one !== engine.version).sort((a, b) => b - a);
  return others.length ? `${served} (and ${others.map((one) => `@${one}`).join(", ")})` : served;
}

// The users of each device of each node; nothing if no node has devices.
export function drawDevices(cluster) {
  const gib = (bytes) => (bytes / 2 ** 30).toFixed(1);
  // A holder is an engine, or what the engines of several policies share.
  const known = new Map(cluster.engines.map((engine) => [engine.engine_id, [engine]]));
  for (const [host, engines] of byHost(cluster.engines)) known.set(host, engines);
  const named = (holder) =>
    (known.get(holder) ?? []).map((engine) => `${engine.policy} ${versionsOf(engine)} ${engine.state}`).join(", ") || holder;
  const rows = cluster.nodes.flatMap((node) =>
    node.devices.map((device) =>
      el(
        "tr",
        { class: node.alive ? "" : "lost" },
        cell(node.alive ? node.name : `${node.name} (lost)`),
        cell(String(device.index)),
        cell(device.device_class),
        cell(`${device.used_bytes == null ? "" : `${gib(device.used_bytes)} of `}${gib(device.memory_bytes)} GiB`),
        cell(device.utilization == null ? "–" : `${Math.round(100 * device.utilization)} %`),
        cell(device.process || "–"),
        cell(device.holders.map(named).join(", ") || "–"),
      )));
  byId("devices-card").hidden = !rows.length;
  byId("devices").tBodies[0].replaceChildren(...rows);
}

// "in_place · 0.41 of 2.3 s": the way of the last weight update, and its part without service.
function updateOf(engine) {
  if (!engine.update_way) return "–";
  const [exposed, whole] = [engine.update_exposed_seconds, engine.update_seconds];
  return `${engine.update_way} · ${exposed.toFixed(2)} of ${whole.toFixed(1)} s`;
}

// The other policies that an engine shares its server or model with.
function othersOn(shared, engine) {
  return (shared.get(engine.host) ?? []).filter((one) => one !== engine).map((one) => one.policy).join(", ") || "–";
}

export function drawEngines(engines, jobId) {
  const shown = engines.filter((engine) => !jobId || engine.job_id === jobId);
  const shared = byHost(shown);
  byId("engines").tHead.querySelector(".shared").hidden = !shared.size;
  // Engines that share are listed together.
  const ordered = [...new Set(shown.flatMap((engine) => shared.get(engine.host) ?? [engine]))];
  const rows = ordered.map((engine) =>
    el(
      "tr",
      { title: engine.message || `${engine.kind} ${engine.device_class}`.trim() },
      cell(engine.engine_id),
      el("td", {}, ...named(engine.policy)),
      el("td", {}, pill(engine.state)),
      cell(versionsOf(engine)),
      ...(shared.size ? [cell(othersOn(shared, engine))] : []),
      cell(String(engine.running)),
      cell(String(engine.waiting)),
      cell(number(engine.tokens_per_second)),
      cell(updateOf(engine)),
    ));
  byId("engines").tBodies[0].replaceChildren(...rows);
}

// "accumulating · 12 samples · 4 swaps, 0.31 s"
function trainerOf(binding) {
  const parts = [binding.prefetched ? "prefetched" : binding.state];
  if (binding.load_bytes) parts[0] = `loading ${Math.round(100 * binding.loaded_bytes / binding.load_bytes)}%`;
  if (binding.samples) parts.push(`${binding.samples} samples`);
  if (binding.swaps) parts.push(`${binding.swaps} swaps, ${binding.swap_seconds.toFixed(2)} s`);
  return parts.join(" · ");
}

// The resolved values of settings that the job leaves open, and their origin.
export function drawSettings(job) {
  const section = byId("settings");
  section.hidden = !job.resolved.length;
  const rows = job.resolved.map((one) => el("tr", {}, cell(one.field), cell(one.value), cell(one.source)));
  section.querySelector("tbody").replaceChildren(...rows);
}

export function drawPolicies(job, bindings) {
  const rows = Object.entries(job.versions).sort().map(([policy, version]) => {
    const binding = bindings.find((b) => b.job_id === job.job_id && b.policy === policy);
    // The newest available metrics: after a step without an update, they come from an earlier step.
    const idle = job.metrics[`${policy}/skipped`] === 1 || job.metrics[`${policy}/samples`] === 0;
    // All advantages were zero: a loss comes from an earlier step.
    const flat = job.metrics[`${policy}/no_signal`] === 1;
    const signals = job.metrics[`${policy}/signal_steps`];
    const metric = (name) => number(idle ? null : job.metrics[`${policy}/${name}`]);
    const doing = binding ? trainerOf(binding) : "–";
    return el(
      "tr",
      {},
      el("td", {}, ...named(policy)),
      cell(`@${version}`),
      cell(doing),
      cell(metric("staleness/mean")),
      cell(metric("entropy")),
      cell(metric("importance_sampling_ratio/max")),
      cell(idle ? "no update" : flat ? "no signal" : metric("loss/policy")),
      cell(signals === undefined ? "–" : `${signals} of ${job.step}`),
    );
  });
  byId("policies").tBodies[0].replaceChildren(...rows);
}

// --- rewards and tools: their calls, warm workers and speed-up by cores ---------------------

const WIDTH = 96;
const HEIGHT = 22;
const seconds = (value) => (value >= 1 ? `${number(value)} s` : `${number(value * 1000)} ms`);

export async function drawFunctions() {
  let found;
  try {
    found = await api("/api/functions");
  } catch (error) {
    // Clear outdated numbers.
    byId("functions-pool").textContent = error.message;
    byId("functions").tBodies[0].replaceChildren();
    return;
  }
  const pool = found.pool ?? {};
  const busy = pool.provisioned_seconds ? ` · ${Math.round((100 * pool.busy_seconds) / pool.provisioned_seconds)} % busy since it started` : "";
  byId("functions-pool").textContent = `${pool.busy ?? 0} of ${pool.workers ?? 0} workers run calls, ${pool.queued ?? 0} calls wait${busy}`;
  byId("functions").tBodies[0].replaceChildren(...found.functions.map(functionRow));
}

function functionRow(one) {
  const spec = one.function;
  const [place, short] = spec.name.includes("/") ? [spec.name.split("/")[0], spec.name.slice(spec.name.indexOf("/") + 1)] : ["", spec.name];
  const failed = one.errors ? el("span", { class: "pill failed" }, String(one.errors)) : "0";
  const cold = one.cold_starts ? `${one.cold_starts} · ${seconds(one.cold_start_p50_seconds)} / ${seconds(one.cold_start_p99_seconds)}` : "–";
  const cells = [place || "deployed", spec.kind || "–", one.invocations.toLocaleString("en"), failed, String(one.running), String(one.queued), one.invocations ? seconds(one.mean_seconds) : "–", cold, String(one.cores_held)];
  return el(
    "tr",
    { title: spec.description || spec.entrypoint },
    el("td", {}, `${short}@${spec.version}`),
    ...cells.map((text) => el("td", {}, text)),
    el("td", {}, curve(one)),
  );
}

// Speed-up over cores as learned: serial + parallel / cores seconds a call.
function curve(one) {
  const most = one.function.max_cores;
  const alone = one.serial_seconds + one.parallel_seconds;
  if (!most || most < 2 || alone <= 0) return "–";
  const gain = (cores) => alone / (one.serial_seconds + one.parallel_seconds / cores);
  const points = Array.from({ length: most }, (_, i) => [((WIDTH - 2) * i) / (most - 1) + 1, HEIGHT - 2 - ((HEIGHT - 4) * (gain(i + 1) - 1)) / (most - 1)]);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("width", WIDTH);
  svg.setAttribute("height", HEIGHT);
  svg.setAttribute("role", "img");
  const text = `${number(gain(most))}x with ${most} cores`;
  svg.setAttribute("aria-label", text);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.map((point) => point.map((x) => x.toFixed(1)).join(",")).join(" "));
  line.setAttribute("fill", "none");
  line.setAttribute("stroke", "currentColor");
  svg.append(line);
  return el("span", { title: text }, svg, ` ${number(gain(most), 2)}x`);
}
