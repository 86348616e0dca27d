// Line charts over uPlot: one per element, resized with it, series added as names appear.
import { colour } from "./dom.js";

export class Chart {
  constructor(element, { x = "step", range } = {}) {
    this.element = element;
    this.x = x;
    this.range = range;
    this.plot = null;
    this.names = [];
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(element);
  }

  size() {
    // The legend stands below the canvas, inside the element.
    return { width: Math.max(200, this.element.clientWidth), height: Math.max(100, this.element.clientHeight - 30) };
  }

  // rows: [{x, values: {name: number}}] in order of x.
  draw(rows, names) {
    const data = [rows.map((row) => row.x), ...names.map((name) => rows.map((row) => row.values[name] ?? null))];
    if (!this.plot || names.join() !== this.names.join()) {
      this.plot?.destroy();
      this.names = names;
      this.plot = new uPlot(this.options(names), data, this.element);
    } else {
      this.plot.setData(data);
    }
    this.element.dataset.points = String(rows.length);
  }

  options(names) {
    const style = getComputedStyle(document.documentElement);
    const axis = {
      stroke: style.getPropertyValue("--muted"),
      grid: { stroke: style.getPropertyValue("--line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui",
    };
    return {
      ...this.size(),
      scales: { x: { time: this.x === "time" }, y: this.range ? { range: this.range } : {} },
      axes: [axis, { ...axis, size: 52 }],
      series: [
        { label: this.x },
        ...names.map((name) => ({
          label: name,
          stroke: colour(name),
          width: 2,
          spanGaps: true,
          points: { show: false },
          value: (_, value) => (value === null ? "–" : value.toPrecision(4)),
        })),
      ],
      cursor: { points: { size: 6 } },
    };
  }
}
