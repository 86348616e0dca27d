// The samples of a job in the experience store, and its audit.
import { api, byId, colour, duration, el, number } from "./dom.js";

const mib = (bytes) => `${number(bytes / 2 ** 20)} MiB`;
let shown = null;

// over: the job has ended, and the store has freed its rows.
export async function drawSamples(job, over) {
  if (job !== shown) {
    shown = job;
    byId("audit-result").textContent = "Was every sample trained once, or dropped with a reason?";
    clear("");
  }
  if (over) return clear("freed when the job ended; the audit shows their outcome");
  let found;
  try {
    found = await api(`/api/jobs/${encodeURIComponent(job)}/tables`);
  } catch (error) {
    // Clear numbers that are outdated or of another job.
    if (job === shown) clear(error.message);
    return;
  }
  if (job !== shown) return;
  const mark = found.high_water_bytes ? ` of ${mib(found.high_water_bytes)}` : "";
  const full = found.over_high_water ? " · above the mark, so rollout has to wait" : "";
  byId("samples-store").textContent = `${mib(found.payload_bytes)}${mark} of rows · Redis ${mib(found.redis_bytes)}${full}`;
  const rows = found.tables.map((one) => {
    const lag = Math.max(0, one.newest_step - one.committed_step);
    const cells = [one.pending, one.ready, one.claimed, one.trained, one.dropped].map((n) => n.toLocaleString("en"));
    cells.push(`${lag} step${lag === 1 ? "" : "s"}`);
    cells.push(one.oldest_pending_sample ? duration(one.oldest_pending_seconds) : "–", mib(one.payload_bytes));
    return el("tr", {}, el("td", { "--c": colour(one.policy) }, one.policy), ...cells.map((text) => el("td", {}, text)));
  });
  byId("samples").tBodies[0].replaceChildren(...rows);
  byId("samples-dropped").textContent = found.tables
    .flatMap((one) => Object.entries(one.drop_reasons).map(([reason, count]) => `${one.policy} dropped ${count} rows or trajectories: ${reason}`))
    .join(" · ");
}

function clear(why) {
  byId("samples-store").textContent = why;
  byId("samples").tBodies[0].replaceChildren();
  byId("samples-dropped").textContent = "";
}

export async function audit(job) {
  byId("audit-result").textContent = "reading the log of every step…";
  const found = await api(`/api/jobs/${encodeURIComponent(job)}/audit`);
  if (job !== shown) return;
  const sum = (field) => found.tables.policies.reduce((total, one) => total + one[field], 0);
  const good = !found.violations.length && !sum("lost") && !sum("duplicated");
  const facts = `${sum("appended")} samples: ${sum("trained")} trained, ${sum("dropped")} dropped, ${sum("live")} live, ${sum("lost")} lost, ${sum("duplicated")} duplicated`;
  byId("audit-result").textContent = `${good ? "passed" : "FAILED"} · ${facts}${found.violations.map((text) => ` · ${text}`).join("")}`;
}
