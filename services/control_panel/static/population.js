// Pools of a job: payoffs as a heat map, meta-strategies over time, ratings and lineage, matches.
import { Chart } from "./charts.js";
import { api, byId, changed, el, number } from "./dom.js";

const chart = new Chart(byId("chart-mixture"), { x: "iteration", range: [0, 1] });
let shown = null;

// The specification tells whether a job has a population; others cause no request.
export async function drawPopulation(job, has, watch) {
  shown = job;
  byId("population-link").hidden = !has;
  if (!has) return;
  const path = `/api/jobs/${encodeURIComponent(job)}`;
  let found, played;
  try {
    found = await api(`${path}/population`);
    played = await api(`${path}/matches?limit=40`);
  } catch (error) {
    if (job !== shown) return;
    byId("population-facts").textContent = error.message;
    return;
  }
  if (job !== shown) return;
  byId("population-facts").textContent = facts(found);
  if (!changed(byId("population"), [job, found, played])) return;
  const ratings = new Map(found.ratings.map((one) => [one.member_id, one]));
  byId("members").tBodies[0].replaceChildren(...found.pools.flatMap((pool) => lineage(pool).map((one) => memberRow(found, pool, one, ratings))));
  byId("payoffs").replaceChildren(...payoffs(found));
  drawMixtures(found);
  byId("matches").replaceChildren(...played.matches.map((match) => matchRow(match, watch)));
}

function facts(found) {
  const parts = [found.algorithm, `iteration ${found.iteration}`, `${found.matches_played.toLocaleString("en")} matches`];
  if (found.matches_due) parts.push(`${found.matches_due.toLocaleString("en")} due`);
  const newest = found.history.at(-1);
  if (newest && newest.nash_conv !== null) parts.push(`NashConv ${number(newest.nash_conv)}`);
  parts.push(found.stopped ? `complete: ${found.stopped}` : found.activity);
  return parts.filter(Boolean).join(" · ");
}

// Members below their parents, each with its depth.
function lineage(pool) {
  const below = new Map();
  const known = new Set(pool.members.map((one) => one.member_id));
  for (const one of pool.members) {
    const parent = known.has(one.parent) ? one.parent : "";
    below.set(parent, [...(below.get(parent) ?? []), one]);
  }
  const rows = [];
  const open = (below.get("") ?? []).map((one) => [one, 0]).reverse();
  while (open.length) {
    const [one, depth] = open.pop();
    rows.push({ ...one, depth });
    // A chain without branches is not indented: hundreds of members stay readable.
    const children = below.get(one.member_id) ?? [];
    for (const child of [...children].reverse()) open.push([child, depth + (children.length > 1 ? 1 : 0)]);
  }
  return rows;
}

function memberRow(found, pool, one, ratings) {
  const mixture = found.history.at(-1)?.mixtures.find((each) => each.pool === pool.name);
  const share = mixture?.probabilities[one.member_id] ?? 0;
  const rating = ratings.get(one.member_id);
  const slots = found.slots.filter((slot) => slot.member_id === one.member_id).map((slot) => slot.policy);
  const kind = one.kind && one.kind !== "main" ? ` · ${one.kind.replaceAll("_", " ")}` : "";
  return el(
    "tr",
    { title: `${one.checksum} · version ${one.version} of ${one.learner}` },
    el("td", { style: { "padding-left": `${one.depth * 14}px` } }, `${one.member_id}${kind}`),
    el("td", {}, one.parent || "–"),
    el("td", {}, String(one.step)),
    el("td", {}, el("span", { class: `pill ${one.state === "settled" ? "on" : one.state === "retired" ? "off" : "starting"}` }, one.state)),
    el("td", {}, share ? `${number(100 * share)} %` : "–"),
    el("td", {}, rating ? `${number(rating.mean)} ± ${number(rating.deviation, 2)}` : "–"),
    el("td", {}, slots.join(", ") || "–"),
  );
}

// Payoffs are shown for two players only; `troupe population show --json` has all.
function payoffs(found) {
  if (found.agents.length !== 2 || !found.cells.length) return [el("p", { class: "muted" }, found.cells.length ? "Payoffs of more than two players have no map." : "No match has been played yet.")];
  const pool = (agent) => found.pools.find((one) => one.agents.includes(agent));
  const [rows, columns] = found.agents.map(pool);
  const cells = new Map();
  for (const cell of found.cells) {
    cells.set(cell.members.join(), [cell, 0]);
    const back = [...cell.members].reverse().join();
    if (found.symmetric && !cells.has(back)) cells.set(back, [cell, 1]);
  }
  const most = Math.max(1e-9, ...found.cells.flatMap((cell) => cell.mean.map(Math.abs)));
  const places = (one) => one.members.map((member, at) => [member, at]).filter(([member]) => member.state !== "retired");
  const head = el("tr", {}, el("th", {}, `${found.agents[0]} \\ ${found.agents[1]}`), ...places(columns).map(([one]) => el("th", {}, one.member_id)));
  const body = places(rows).map(([one, row]) =>
    el("tr", {}, el("th", {}, one.member_id), ...places(columns).map(([other, column]) => payoff(cells.get(`${row},${column}`), most, one, other))),
  );
  return [el("table", { class: "heat" }, el("thead", {}, head), el("tbody", {}, ...body))];
}

function payoff(found, most, one, other) {
  if (!found) return el("td", { class: "unplayed", title: `${one.member_id} and ${other.member_id} have not met` }, "·");
  const [cell, player] = found;
  const mean = cell.mean[player];
  const sure = cell.exact ? "computed" : `${cell.matches} matches${cell.half_width === null ? "" : `, ± ${number(cell.half_width)}`}`;
  const strength = Math.round((40 * Math.abs(mean)) / most);
  return el(
    "td",
    { style: { background: `color-mix(in srgb, var(${mean < 0 ? "--bad" : "--good"}) ${strength}%, transparent)` }, title: `${one.member_id} against ${other.member_id}: ${number(mean)} (${sure})` },
    number(mean),
  );
}

function drawMixtures(found) {
  const several = found.pools.length > 1;
  const shares = new Map();
  found.history.forEach((solved, at) => {
    for (const mixture of solved.mixtures) {
      for (const [member, share] of Object.entries(mixture.probabilities)) {
        const name = several ? `${mixture.pool} ${member}` : member;
        if (!shares.has(name)) shares.set(name, found.history.map(() => 0));
        shares.get(name)[at] = share;
      }
    }
  });
  chart.draw(found.history.map((solved) => solved.iteration), [...shares].map(([name, values]) => ({ name, values })));
}

function matchRow(match, watch) {
  const players = Object.entries(match.members).map(([agent, member]) => `${agent} ${member} ${number(match.payoffs[agent])}`);
  return el(
    "button",
    { class: "row", "data-match": match.trajectory_id, onclick: () => watch(match.trajectory_id) },
    el("span", {}, players.join(" · ")),
    el("span", { class: `pill ${match.state}` }, match.state),
    el("small", {}, `iteration ${match.iteration} · ${match.trajectory_id}${match.reason ? ` · ${match.reason}` : ""}`),
  );
}
