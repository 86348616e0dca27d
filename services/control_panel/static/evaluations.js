// Evaluations of a job over the versions of its policies: the newest as tiles, all as a chart and tables.
import { Chart } from "./charts.js";
import { byId, changed, el, inBrackets, number } from "./dom.js";

const SCORE = /^(evaluation|evaluations\/[\w-]+)\/(pass@\d+|maj@\d+|team\/mean|reward\/[\w-]+\/mean)$/;
const SHORT = /^evaluations?\/((?:[\w-]+\/)?(?:(?:pass|maj)@\d+|team(?=\/mean)|reward\/[\w-]+(?=\/mean)))(?:\/mean)?$/;
const chart = new Chart(byId("chart-evaluation"), { spans: true });
const MOST_ROWS = 50;
// Of more scores than this, the chart begins with one of each evaluation.
const MOST_LINES = 6;
const MOST_TILES = 4;
// Of more evaluations than this, the tables are folded.
const MOST_OPEN = 3;
const NAME = /^(?:([\w-]+)\/)?(pass@\d+|maj@\d+|team|reward\/[\w-]+)$/;

// The evaluation ("": the one without a name) and the score in a name such as `gsm8k/pass@1`,
// `team_success` or `gsm8k/reward/solver`.
function partsOf(name) {
  const found = name.replace(/team_success$/, "team").match(NAME);
  return found ? { name, set: found[1] ?? "", score: found[2] } : { name, set: "", score: name };
}

// "held-out team success", "pass@1 on gsm8k", "reward of solver on gsm8k"
function spoken({ set, score }) {
  const said = score.replace(/^team$/, "team success").replace(/^reward\//, "reward of ").replaceAll("_", " ");
  return set ? `${said} on ${set}` : `held-out ${said}`;
}

const rank = (score) => [score.startsWith("pass") ? 0 : score.startsWith("maj") ? 1 : score.startsWith("team") ? 2 : 3, Number(score.match(/@(\d+)/)?.[1] ?? 0)];
const byRank = (a, b) => rank(a)[0] - rank(b)[0] || rank(a)[1] - rank(b)[1] || a.localeCompare(b);
const bySet = (a, b) => a.localeCompare(b, "en", { numeric: true });

// The most telling score of an evaluation: the best checkpoint's, or else the first by rank.
function headline(set, scores, kept) {
  const prefix = set ? `evaluations/${set}` : "evaluation";
  return scores.find((score) => kept?.metric.replace(/\/mean$/, "") === `${prefix}/${score}`) ?? [...scores].sort(byRank)[0];
}

// Sorts what has `set` and `score`, evaluations by name, and marks the headline of each.
function inOrder(items, kept) {
  const sets = Map.groupBy(items, (one) => one.set);
  return [...sets.keys()].sort(bySet).flatMap((set) => {
    const first = headline(set, sets.get(set).map((one) => one.score), kept);
    return sets.get(set).map((one) => ({ ...one, headline: one.score === first })).sort((a, b) => b.headline - a.headline || byRank(a.score, b.score));
  });
}

// Returns the newest value of a score by its name in `before`, and its interval.
function heldOut(job, { name, set, score }) {
  const mean = score.includes("@") ? score : `${score}/mean`;
  const metric = `${set ? `evaluations/${set}` : "evaluation"}/${mean}`;
  if (name in job.after) return [job.after[name], job.after_intervals[name]];
  if (!(metric in job.metrics)) return [job.before[name], job.before_intervals[name]];
  const [low, high] = ["low", "high"].map((end) => job.metrics[`${metric}/${end}`]);
  return [job.metrics[metric], low === undefined ? undefined : { low, high }];
}

// The headlines of a job's evaluations as [label, [first, newest], difference], and how many are left out.
export function evaluationTiles(job, kept) {
  const headlines = inOrder(Object.keys(job.before).map(partsOf), kept).filter((one) => one.headline);
  const tiles = headlines.slice(0, MOST_TILES).map((one) => {
    const first = [job.before[one.name], job.before_intervals[one.name]];
    const newest = heldOut(job, one);
    return newest[0] === first[0] ? [spoken(one), [first]] : [spoken(one), [first, newest], newest[0] - first[0]];
  });
  const more = headlines.length - tiles.length;
  if (more) tiles.push(["further evaluations, in the tables below", String(more)]);
  return tiles;
}

// Returns whether a metric is shown among evaluations.
export const ofEvaluations = (name) => SHORT.test(name.replace(/\/(low|high)$/, "")) || /^evaluations?\/(?:[\w-]+\/)?version\//.test(name);

// table: the metrics of evaluations; seconds: on the wall clock, of each of its steps; spec: the job's specification, null until it is known.
export function drawEvaluations(table, seconds, spec) {
  const kept = spec?.checkpoint?.best;
  const scores = inOrder(table.series(SHORT).map((one) => ({ ...one, ...partsOf(one.name) })), kept);
  const series = scores.map((one) => {
    const bounds = table.columns.has(`${one.metric}/low`) ? { low: table.column(`${one.metric}/low`), high: table.column(`${one.metric}/high`) } : {};
    // A reward has its agent's colour.
    const of = one.score.startsWith("reward/") ? one.score.slice("reward/".length) : one.set ? one.name : one.score;
    return { name: spoken(one), values: one.values, of, folded: scores.length > MOST_LINES && !one.headline, ...bounds };
  });
  byId("evaluation-card").hidden = !series.length;
  chart.draw(table.steps, series, seconds);
  const sets = new Map();
  for (const name of table.columns.keys()) {
    const found = name.match(SCORE);
    if (found) sets.set(found[1], [...(sets.get(found[1]) ?? []), found[2]]);
  }
  if (!changed(byId("evaluations"), [table.steps.length, table.steps.at(-1), [...sets], kept])) return;
  const unfolded = new Set([...byId("evaluations").querySelectorAll("details[open]")].map((one) => one.dataset.evaluation));
  const open = (prefix) => sets.size <= MOST_OPEN || unfolded.has(prefix);
  byId("evaluations").replaceChildren(...[...sets].sort(([a], [b]) => bySet(a, b)).map(([prefix, names]) => evaluationTable(table, prefix, names, kept, open(prefix))));
}

function evaluationTable(table, prefix, scores, kept, open) {
  scores.sort(byRank);
  const columns = scores.map((name) => {
    const metric = `${prefix}/${name}`;
    const values = table.column(metric);
    const least = kept?.metric === metric && kept.mode === "min";
    let best = -1;
    values.forEach((value, i) => {
      if (value !== null && (best < 0 || (least ? value < values[best] : value > values[best]))) best = i;
    });
    // Among equal values none is the best.
    if (!values.some((value) => value !== null && value !== values[best])) best = -1;
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
    "details",
    { class: "evaluation", "data-evaluation": prefix, open: open ? "" : null },
    el("summary", {}, el("h3", {}, title)),
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

