// Rewards and tools: their calls, warm workers and speed-up by cores.
import { api, byId, colour, el, number } from "./dom.js";

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
  byId("functions").tBodies[0].replaceChildren(...found.functions.map(row));
}

function row(one) {
  const spec = one.function;
  const [place, short] = spec.name.includes("/") ? [spec.name.split("/")[0], spec.name.slice(spec.name.indexOf("/") + 1)] : ["", spec.name];
  const failed = one.errors ? el("span", { class: "pill failed" }, String(one.errors)) : "0";
  const cold = one.cold_starts ? `${one.cold_starts} · ${seconds(one.cold_start_p50_seconds)} / ${seconds(one.cold_start_p99_seconds)}` : "–";
  const cells = [place || "deployed", spec.kind || "–", one.invocations.toLocaleString("en"), failed, String(one.running), String(one.queued), one.invocations ? seconds(one.mean_seconds) : "–", cold, String(one.cores_held)];
  return el(
    "tr",
    { title: spec.description || spec.entrypoint },
    el("td", { "--c": colour(short) }, `${short}@${spec.version}`),
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
