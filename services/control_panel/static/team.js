// Monitors of a job's team, each a small chart with a line per agent (docs/team-monitors.md).
import { Chart } from "./charts.js";
import { byId, el } from "./dom.js";

const SHARE = { range: [0, 1] };
// Of steps: metric, title, explanation, options of the chart.
const OF_STEPS = [
  ["turn_share", "Share of turns", "", SHARE],
  ["token_share", "Share of tokens", "", SHARE],
  ["trajectory/copying", "Copying", "of an agent's text, what another wrote first", SHARE],
].map(([metric, title, about, options]) => card(metric, new RegExp(`^${metric}/([\\w-]+)$`), title, about, options));
// Of evaluations.
const OF_EVALUATIONS = [
  ["contribution", "Contribution", "success as played, minus without the agent", {}],
  ["accepts_wrong", "Wrong, but accepted", "by judge, of what does not solve the query", SHARE],
  ["rejects_right", "Right, but rejected", "by judge, of what solves the query", SHARE],
  ["trajectory/agreement", "Agreement", "of the others' answers, those equal to the agent's", SHARE],
].map(([metric, title, about, options]) =>
  card(metric, new RegExp(`^(?:evaluation|evaluations/[\\w-]+)/${metric}/([\\w-]+)$`), title, about, { spans: true, ...options }),
);
const BOUND = /\/(low|high)$/;

function card(metric, pattern, title, about, options) {
  const place = el("div", { class: "chart" });
  const article = el("article", { class: "card", "data-metric": metric }, el("h2", {}, `${title} `, el("small", {}, about)), place);
  byId("team-charts").append(article);
  return { pattern, article, chart: new Chart(place, options) };
}

// Returns whether a metric is drawn here.
export const ofTeam = (name) => [...OF_STEPS, ...OF_EVALUATIONS].some(({ pattern }) => pattern.test(name.replace(BOUND, "")));

// training, evaluations: tables of metrics; clock: the seconds of each step of a table.
export function drawTeam(training, evaluations, clock) {
  let drawn = 0;
  for (const [table, cards] of [[training, OF_STEPS], [evaluations, OF_EVALUATIONS]]) {
    for (const { pattern, article, chart } of cards) {
      const series = table.series(pattern).map((one) => withBounds(table, one));
      article.hidden = !series.length;
      drawn += series.length;
      // Hidden charts are not drawn: what they are in has to be shown first.
      byId("team").hidden &&= !drawn;
      chart.draw(table.steps, series, clock(table));
    }
  }
  byId("team").hidden = !drawn;
}

// Lines of named evaluations say which, and have their agent's colour.
function withBounds(table, { metric, name, values }) {
  const set = metric.match(/^evaluations\/([\w-]+)\//)?.[1];
  const bounds = table.columns.has(`${metric}/low`) ? { low: table.column(`${metric}/low`), high: table.column(`${metric}/high`) } : {};
  return { name: set ? `${name} on ${set}` : name, of: name, values, ...bounds };
}
