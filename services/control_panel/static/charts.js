// Metrics by step as columns, and line charts of them over uPlot.
import { TEAM, besideCast, variable } from "./colours.js";
import { api, byId, duration, el, moment, number } from "./dom.js";

// The values of a job's metrics: one column per metric over steps that ascend.
export class MetricTable {
  constructor() {
    this.steps = [];
    this.columns = new Map();
  }

  // Adds the values of one step. A repeated step (after a job was resumed) replaces its values.
  add(step, values) {
    let at = this.steps.length;
    if (at && step <= this.steps[at - 1]) {
      at = this.place(step);
      if (this.steps[at] !== step) {
        this.steps.splice(at, 0, step);
        for (const column of this.columns.values()) if (column.length > at) column.splice(at, 0, null);
      }
    } else {
      this.steps.push(step);
    }
    for (const [name, value] of Object.entries(values)) {
      let column = this.columns.get(name);
      if (!column) this.columns.set(name, (column = []));
      while (column.length <= at) column.push(null);
      column[at] = value;
    }
  }

  // Adds a page of columns, null where a step has no value; an older page goes in front.
  merge(steps, columns) {
    const names = Object.keys(columns);
    const told = steps.map((_, i) => i).filter((i) => names.some((name) => columns[name][i] !== null));
    const first = this.steps[0] ?? Infinity;
    const before = told.filter((i) => steps[i] < first);
    if (before.length) {
      for (const name of new Set([...this.columns.keys(), ...names])) {
        const values = columns[name];
        this.columns.set(name, before.map((i) => values?.[i] ?? null).concat(this.columns.get(name) ?? []));
      }
      this.steps = before.map((i) => steps[i]).concat(this.steps);
    }
    for (const i of told.slice(before.length)) {
      const values = names.filter((name) => columns[name][i] !== null).map((name) => [name, columns[name][i]]);
      this.add(steps[i], Object.fromEntries(values));
    }
  }

  // Returns the first index whose step is not before `step`.
  place(step) {
    let [low, high] = [0, this.steps.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.steps[middle] < step) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // The seconds of all steps until the end of each of `steps`, by the metric `name`; null without it.
  secondsAt(name, steps = this.steps) {
    if (!this.columns.has(name)) return null;
    const sums = [0];
    for (const value of this.column(name)) sums.push(sums.at(-1) + (value ?? 0));
    return steps.map((step) => sums[this.place(step + 1)]);
  }

  // A metric's values, null where a step has none.
  column(name) {
    const column = this.columns.get(name) ?? [];
    while (column.length < this.steps.length) column.push(null);
    return column;
  }

  // Series under short names: the match of the pattern's first group.
  series(pattern) {
    if (this.known !== this.columns.size) {
      this.known = this.columns.size;
      this.found = new Map();
    }
    if (!this.found.has(pattern)) {
      const names = [...this.columns.keys()].filter((name) => pattern.test(name)).sort();
      this.found.set(pattern, names.map((name) => [name, name.match(pattern)[1] ?? name]));
    }
    return this.found.get(pattern).map(([metric, name]) => ({ metric, name, values: this.column(metric) }));
  }
}

// Pages of the metrics logged after a step, as columns: the newest page first.
export async function* curves(job, names, after = -1) {
  const query = new URLSearchParams(names.map((name) => ["name", name]));
  query.set("after_step", after);
  do {
    const page = await api(`/api/jobs/${encodeURIComponent(job)}/curves?${query}`);
    yield page;
    query.set("page", page.next_page);
  } while (query.get("page"));
}

// The style of all charts over steps; kept in the browser.
const LOOK = "troupe-charts";
export const look = { smoothing: 0, log: false, clock: false, ...JSON.parse(localStorage.getItem(LOOK) ?? "{}") };
const charts = new Set();

// Wires the controls of smoothing and of the axes.
export function chartControls() {
  const [smoothing, log, shown, across] = [byId("smoothing"), byId("log-axis"), byId("smoothing-value"), byId("x-axis")];
  smoothing.value = look.smoothing;
  log.checked = look.log;
  across.value = look.clock ? "clock" : "step";
  const take = () => {
    look.smoothing = Number(smoothing.value);
    look.log = log.checked;
    look.clock = across.value === "clock";
    shown.textContent = look.smoothing ? look.smoothing.toFixed(2) : "off";
    localStorage.setItem(LOOK, JSON.stringify(look));
    redrawCharts();
  };
  smoothing.addEventListener("input", take);
  log.addEventListener("change", take);
  across.addEventListener("change", take);
  take();
}

// Draws the missed updates of hidden charts, or redraws all charts after a change of style.
export function redrawCharts() {
  for (const chart of charts) chart.redraw();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);

// The exponential moving average, without the bias of its beginning; gaps stay gaps.
export function smoothed(values, weight) {
  let [sum, share] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return sum / share;
  });
}

const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
// Of the wall clock, from seconds to months.
const CLOCK = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 432000, 864000, 2592000];
const SECONDS = [1, 5, 10, 30, ...CLOCK.filter((one) => one >= 60)];
const DAY = 86400;
const MARKED_POINTS = 60;
// With more points than this a line is a pixel wide: wider lines hide the noise, and take most of the
// drawing time.
const DENSE_POINTS = 1500;
// Lines of one colour, or that mostly cover each other, have different dashes.
const DASHES = [[], [9, 6], [2, 4], [9, 4, 2, 4]];
// Lines cover each other where they are closer than this fraction of the chart's height.
const NEAR = 0.01;
const COMPARED_POINTS = 200;
// With more intervals than this, only the interval of the name pointed at is filled: all would cover the chart.
const MOST_BANDS = 3;

// Returns whether two lines are closer than `near` in most of the points that both have.
function cover(one, other, near) {
  let [both, close] = [0, 0];
  const stride = Math.max(1, Math.floor(one.length / COMPARED_POINTS));
  for (let i = one.length - 1; i >= 0; i -= stride) {
    if (one[i] == null || other[i] == null) continue;
    both += 1;
    close += Math.abs(one[i] - other[i]) <= near;
  }
  return both > 0 && 2 * close > both;
}

// Returns for each series the number of its dash: the first that no earlier series has that it
// covers or that has its colour.
export function dashes(series, colours) {
  let [least, most] = [Infinity, -Infinity];
  for (const { values } of series) for (const value of values) if (value != null) [least, most] = [Math.min(least, value), Math.max(most, value)];
  const found = [];
  series.forEach((one, i) => {
    const taken = new Set();
    for (let j = 0; j < i; j += 1) {
      if (colours[i] === colours[j] || cover(one.values, series[j].values, NEAR * (most - least))) taken.add(found[j]);
    }
    const free = DASHES.findIndex((_, dash) => !taken.has(dash));
    found.push(free < 0 ? i % DASHES.length : free);
  });
  return found;
}

// The range of a value axis: of nothing but zeros it is 0 to 1.
function valueRange(_, least, most) {
  if (least == null || (least === 0 && most === 0)) return [0, 1];
  return uPlot.rangeNum(least, most, 0.1, true);
}

// Values between two gaps have no line and are marked.
function isolated(plot, index, show) {
  if (show) return null;
  const values = plot.data[index];
  const found = [];
  const [first, last] = plot.series[0].idxs;
  for (let i = first; i <= last; i += 1) {
    if (values[i] != null && values[i - 1] == null && values[i + 1] == null) found.push(i);
  }
  return found.length ? found : null;
}

// A time of the day: with its date where a chart is longer than that, and without seconds where times
// are minutes apart.
function timeOf(seconds, long, distance = 1) {
  const at = new Date(seconds * 1000);
  if (long) return moment(at);
  return distance < 60 ? at.toLocaleTimeString() : at.toLocaleTimeString([], { hour: "numeric", minute: "2-digit" });
}

export class Chart {
  // x: "step" or another whole number, or "time". spans: lines bridge steps without a value.
  constructor(element, { x = "step", range, spans = false } = {}) {
    Object.assign(this, { element, x, range, spans, plot: null, key: "", xs: [], counted: [], seconds: null, series: [], hidden: new Set(), known: new Set(), zoomed: false });
    // The colours' numbers by name; null: those of the chosen job's cast, and the free ones.
    this.among = null;
    // Whose interval is filled where there are too many.
    this.pointed = null;
    this.title = element.parentElement.querySelector("h2, h3")?.firstChild?.textContent.trim() || "Chart";
    this.area = el("div", { class: "plot", role: "img", tabindex: "0", onkeydown: (event) => this.onKey(event), ondblclick: () => (this.zoomed = false) });
    this.legend = el("div", { class: "legend" });
    this.said = el("p", { class: "unseen", "aria-live": "polite" });
    element.replaceChildren(this.area, this.legend, this.said);
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.area);
    charts.add(this);
  }

  size() {
    return { width: Math.max(120, this.area.clientWidth), height: Math.max(80, this.area.clientHeight) };
  }

  // xs ascend; seconds: the places on the wall clock, null where there is none.
  // series: [{name, values, low, high, of, folded}]; low, high: bounds of an interval; of: the name
  // whose colour it has ("": none), by default its own; folded: hidden until its name is chosen.
  draw(xs, series, seconds = null) {
    [this.counted, this.seconds] = [xs, seconds];
    this.series = series;
    this.element.dataset.points = String(xs.length);
    this.redraw();
  }

  redraw() {
    // A hidden chart is drawn once it becomes visible.
    if (!this.element.offsetParent) return;
    this.clock = look.clock && this.seconds !== null;
    this.xs = this.clock ? this.seconds : this.counted;
    const lines = this.lines();
    const data = [this.xs, ...lines.map((line) => line.values)];
    const style = getComputedStyle(document.documentElement);
    const owners = this.series.map((one) => one.of ?? one.name);
    // By name, first those that show.
    const namesOf = (folded) => owners.filter((name, i) => name && name !== TEAM && Boolean(this.series[i].folded) === folded).sort();
    const among = this.among ?? besideCast([...namesOf(false), ...namesOf(true)]);
    this.colours = new Map(this.series.map((one, i) => [one.name, variable(owners[i], among)]));
    for (const { name, folded } of this.series) {
      if (folded && !this.known.has(name)) this.hidden.add(name);
      this.known.add(name);
    }
    const shown = this.series.filter((one) => !this.hidden.has(one.name));
    const numbers = dashes(shown, shown.map((one) => this.colours.get(one.name)));
    this.dashes = new Map(shown.map((one, i) => [one.name, numbers[i]]));
    const key = JSON.stringify([lines.map((line) => [line.name, line.kind]), [...this.colours.values()], look.log, this.clock, style.getPropertyValue("--muted"), this.range, this.dense()]);
    if (!this.plot || key !== this.key) {
      this.plot?.destroy();
      this.key = key;
      this.drawLegend();
      this.plot = new uPlot(this.options(lines, style), data, this.area);
      this.zoomed = false;
      // Before its first drawing, which follows.
      this.fill();
    } else {
      this.plot.series.forEach((one, i) => i && (one.dash = DASHES[this.dashes.get(one.label) ?? 0]));
      this.plot.setData(data, !this.zoomed);
      if (this.zoomed) this.plot.redraw();
    }
    for (const [name, dash] of this.dashes) this.swatches.get(name).dataset.dash = String(dash);
    this.read(null);
  }

  // Fills the intervals: all if they are few, else the one of the name pointed at.
  fill() {
    const among = this.series.filter((one) => one.low && !this.hidden.has(one.name)).length;
    this.plot.delBand(null);
    let filled = 0;
    this.plot.series.forEach(({ label }, i) => {
      // The bounds of an interval are two lines, the upper one first.
      if (this.plot.series[i].kind !== "high" || this.hidden.has(label) || (among > MOST_BANDS && label !== this.pointed)) return;
      this.plot.addBand({ series: [i, i + 1], fill: `${this.paint(label)}26` });
      filled += 1;
    });
    this.element.dataset.bands = String(filled);
  }

  point(name) {
    this.pointed = name;
    if (!this.plot || !this.series.some((one) => one.low)) return;
    this.fill();
    this.plot.redraw();
  }

  // The colour of a series, for a canvas.
  paint(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(this.colours.get(name)).trim();
  }

  dense() {
    return this.xs.length > DENSE_POINTS;
  }

  // The lines of uPlot: per series the bounds of its interval, the raw values where smoothed, the line.
  lines() {
    const over = this.x === "time" ? 0 : look.smoothing;
    const positive = (values) => (look.log && this.x !== "time" ? values.map((value) => (value > 0 ? value : null)) : values);
    return this.series.flatMap((one) => {
      const lines = [];
      if (one.low) lines.push({ name: one.name, kind: "high", values: positive(one.high) }, { name: one.name, kind: "low", values: positive(one.low) });
      if (over) lines.push({ name: one.name, kind: "raw", values: positive(one.values) });
      lines.push({ name: one.name, kind: "line", values: positive(over ? smoothed(one.values, over) : one.values) });
      return lines;
    });
  }

  options(lines, style) {
    const axis = {
      stroke: style.getPropertyValue("--muted"),
      grid: { stroke: style.getPropertyValue("--line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui",
    };
    const time = this.x === "time";
    const long = this.xs.at(-1) - this.xs[0] > DAY;
    const clock = (_, ticks, __, ___, distance) => ticks.map((tick) => timeOf(tick, long, distance));
    const across = time ? { ...axis, size: 30, incrs: SECONDS, space: 90, values: clock } : this.clock ? { ...axis, size: 30, incrs: CLOCK, space: 70, values: (_, ticks) => ticks.map(duration) } : { ...axis, size: 30, incrs: WHOLE };
    // Charts over time show counts of waiting and running turns.
    const counts = (_, __, most) => [0, Math.max(4, most * 1.1)];
    const log = look.log && !time && !this.range;
    return {
      ...this.size(),
      scales: { x: { time }, y: this.range ? { range: this.range } : time ? { range: counts } : log ? { distr: 3 } : { range: valueRange } },
      axes: [across, { ...axis, size: 52, ...(time ? { incrs: WHOLE } : {}) }],
      legend: { show: false },
      series: [
        { label: this.x },
        ...lines.map((line) => ({
          label: line.name,
          kind: line.kind,
          dash: DASHES[this.dashes.get(line.name) ?? 0],
          show: !this.hidden.has(line.name),
          stroke: line.kind === "line" ? this.paint(line.name) : line.kind === "raw" ? `${this.paint(line.name)}50` : "transparent",
          width: line.kind === "line" && !this.dense() ? 2 : 1,
          spanGaps: this.spans,
          points: { show: (_, __, first, last) => line.kind === "line" && last - first < MARKED_POINTS, filter: line.kind === "line" ? isolated : undefined, size: 5, fill: this.paint(line.name) },
        })),
      ],
      cursor: { points: { size: 6 } },
      hooks: {
        setCursor: [(plot) => this.read(plot.cursor.idx)],
        setSelect: [(plot) => (this.zoomed ||= plot.select.width > 0)],
      },
    };
  }

  drawLegend() {
    this.values = new Map();
    this.swatches = new Map();
    this.legend.replaceChildren(
      ...this.series.map(({ name }) => {
        const value = el("span", { class: "value" });
        this.values.set(name, value);
        const swatch = el("i", { class: "swatch", "--swatch": `var(${this.colours.get(name)})`, "aria-hidden": "true" });
        this.swatches.set(name, swatch);
        const on = { onclick: (event) => this.toggle(name, event.currentTarget), onpointerenter: () => this.point(name), onpointerleave: () => this.point(null), onfocus: () => this.point(name), onblur: () => this.point(null) };
        return el("button", { type: "button", "aria-pressed": String(!this.hidden.has(name)), title: "Show or hide", ...on }, swatch, name, " ", value);
      }),
    );
  }

  toggle(name, button) {
    const hide = !this.hidden.has(name);
    if (hide) this.hidden.add(name);
    else this.hidden.delete(name);
    button.setAttribute("aria-pressed", String(!hide));
    this.plot.series.forEach((one, i) => i && one.label === name && this.plot.setSeries(i, { show: !hide }));
    this.fill();
    this.redraw();
  }

  // Shows the values at an index of the x axis; null: the newest of each series.
  read(at) {
    const place = at === null || at === undefined ? null : at;
    const said = [];
    for (const { name, values } of this.series) {
      let i = place ?? values.length - 1;
      if (place === null) while (i > 0 && values[i] == null) i -= 1;
      const text = number(values[i], 4);
      const node = this.values?.get(name);
      if (node && node.textContent !== text) node.textContent = text;
      said.push(`${name} ${text}`);
    }
    if (place === null) this.area.setAttribute("aria-label", `${this.title}. ${said.length ? `Newest: ${said.join(", ")}. Arrow keys read values by ${this.x}.` : "No values yet."}`);
    return said;
  }

  // Left and right read the values of one step after the other; Escape ends a zoom.
  onKey(event) {
    if (!this.plot || !this.xs.length) return;
    const last = this.xs.length - 1;
    const now = this.plot.cursor.idx ?? last;
    const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last };
    if (event.key === "Escape" && this.zoomed) {
      this.zoomed = false;
      this.plot.setData(this.plot.data);
    } else if (event.key in moves) {
      event.preventDefault();
      const to = Math.max(0, Math.min(last, moves[event.key]));
      this.plot.setCursor({ left: this.plot.valToPos(this.xs[to], "x"), top: 10 });
      this.said.textContent = `${this.x} ${this.x === "time" ? timeOf(this.xs[to], this.xs.at(-1) - this.xs[0] > DAY) : this.counted[to]}${this.clock ? ` after ${duration(this.xs[to])}` : ""}: ${this.read(to).join(", ")}`;
    }
  }
}
