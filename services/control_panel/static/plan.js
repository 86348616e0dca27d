// The planner: devices by sliders, the best split of them for a job, and a picture of one step.
import { besideCast, colour } from "./colours.js";
import { api, byId, el, number } from "./dom.js";

const GB = 2 ** 30;
const form = byId("plan-form");
let asked = 0;

const percent = (value) => `${Math.round(100 * value)} %`;
const field = (name) => form.elements.namedItem(name);
const devices = () => 2 ** Number(field("count").value);

// Hosts as full as possible, and all equally.
function hosts() {
  const most = Math.max(1, Number(field("per_host").value) || 1);
  let count = Math.ceil(devices() / most);
  while (devices() % count) count += 1;
  return count;
}

function drawDevices() {
  const many = hosts();
  byId("plan-devices").textContent = `${devices()} on ${many} host${many > 1 ? "s" : ""}`;
}
form.addEventListener("input", drawDevices);
drawDevices();

// Plans for the chosen job, whose specification is `spec`, or for the text of a new job.
export async function planFor(job, spec) {
  const mine = ++asked;
  const problem = byId("plan-problem");
  const facts = byId("plan-facts");
  problem.textContent = "";
  const written = field("job").value === "new";
  const body = written ? byId("submit-spec").value : spec && JSON.stringify(spec);
  if (!body) {
    problem.textContent = written ? "The new job has no text: write it on the page “New job”." : "Choose a job, or write a new one.";
    return;
  }
  const query = new URLSearchParams({ devices: `${devices()}x${field("class").value.trim()}-${field("memory").value}GB`, hosts: hosts() });
  if (field("measured").checked && job) query.set("profile", job);
  facts.textContent = "planning ...";
  byId("plan-result").setAttribute("aria-busy", "true");
  try {
    const found = await api(`/api/plan?${query}`, { method: "POST", headers: { "content-type": written ? "application/yaml" : "application/json" }, body });
    if (mine === asked) draw(found);
  } catch (error) {
    if (mine !== asked) return;
    facts.textContent = "";
    byId("plan-result").hidden = true;
    problem.textContent = error.message;
  } finally {
    byId("plan-result").setAttribute("aria-busy", "false");
  }
}

function draw(found) {
  const { best } = found;
  byId("plan-result").hidden = false;
  byId("plan-facts").textContent = [
    `${number(best.seconds_per_step)} s per step`,
    `${best.engine_devices} devices generate, ${best.training_devices} train`,
    `${number(best.response_tokens_per_second)} response tokens/s`,
    `engines are busy ${percent(best.engines_busy)} of the time, trainers ${percent(best.trainers_busy)}`,
    `a step waits for ${best.bottleneck}`,
    moreText(found),
  ].filter(Boolean).join(" · ");
  byId("plan-policies").tBodies[0].replaceChildren(...Object.entries(best.policies).map(([name, one]) => row([
    name,
    one.shares_engines_of ? `with ${one.shares_engines_of}` : best.engine_hosts > 1 ? `${one.replicas} x ${best.engine_hosts} hosts` : one.replicas,
    one.tensor_parallel,
    one.turns_at_once,
    one.gang || "–",
    one.gang ? Math.round(one.trainer_bytes / GB) : "–",
  ])));
  byId("plan-others").tBodies[0].replaceChildren(...found.others.map((one) => row([
    number(one.seconds_per_step),
    `+${percent(one.seconds_per_step / best.seconds_per_step - 1)}`,
    one.engine_devices,
    one.training_devices,
    Object.entries(one.policies).map(([name, p]) => (p.shares_engines_of ? `${name} with ${p.shares_engines_of}` : `${name} ${p.replicas}x${p.tensor_parallel}`)).join(", "),
    Object.entries(one.policies).filter(([, p]) => p.gang).map(([name, p]) => `${name} ${p.gang}`).join(", ") || "–",
    percent(one.engines_busy),
    percent(one.trainers_busy),
    one.bottleneck,
  ])));
  byId("plan-set").textContent = found.set.map((one) => `--set ${one}`).join("\n");
  const origins = (title, lines) => lines.map((line) => el("li", {}, `${title}: ${line}`));
  byId("plan-origins").replaceChildren(...found.shared.map((line) => el("li", {}, line)), ...origins("assumed", found.assumed), ...origins("measured", found.measured));
  drawPicture(found.picture, best.seconds_per_step);
}

function moreText(found) {
  const seconds = found.seconds_with_one_more_host;
  if (seconds === null) return "";
  const gain = 1 - seconds / found.best.seconds_per_step;
  return gain > 0.005 ? `one more host: ${number(seconds)} s (${percent(gain)} shorter)` : "one more host would not shorten the step";
}

const row = (cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, String(cell))));

// One lane per engine and trainer; its busy times are bars in the colours of policies.
function drawPicture(picture, mean) {
  const policies = [...new Set(picture.lanes.flatMap((lane) => lane.busy.map(([policy]) => policy)))].sort();
  const among = besideCast(policies);
  const steps = picture.ends.length;
  byId("plan-steps").textContent = steps > 1 ? `${steps} steps` : "One step";
  byId("plan-legend").replaceChildren(
    `${number(picture.seconds)} s, ${number(mean)} s per step `,
    ...policies.map((name) => el("span", { class: "lane-key", style: { "--lane": colour(name, among) } }, name)),
    picture.hidden_lanes ? ` ${picture.hidden_lanes} more lanes are not drawn` : "",
  );
  const part = (seconds) => `${(100 * seconds) / picture.seconds}%`;
  byId("plan-picture").replaceChildren(...picture.lanes.map((lane) => {
    const busy = lane.busy.reduce((sum, [, began, end]) => sum + end - began, 0);
    const bars = lane.busy.map(([policy, began, end]) => el("i", {
      title: `${policy}: ${number(began)} to ${number(end)} s`,
      style: { left: part(began), width: part(end - began), "--lane": colour(policy, among) },
    }));
    const name = lane.lane.startsWith(lane.kind) ? lane.lane : `${lane.kind} ${lane.lane}`;
    const label = `${name}: busy ${percent(Math.min(1, busy / picture.seconds))}`;
    return el("div", { class: "lane" }, el("span", {}, name), el("div", { class: "bars", role: "img", "aria-label": label }, ...bars, ...picture.ends.slice(0, -1).map((at) => el("b", { title: "a step ends", style: { left: part(at) } }))));
  }));
}
