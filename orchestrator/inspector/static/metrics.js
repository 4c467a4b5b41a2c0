// The headline metrics, on the time axis of the lanes.

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { number } from "./format.js";
import { GUTTER, MARGIN } from "./lanes.js";

const NAMES = { "reward/mean": "Reward", "train/kl_loss": "KL", "train/grad_norm": "Gradient norm", "perf/step_s": "Step, s" };
const HEIGHT = 84;

export class Metrics {
  constructor(box) {
    this.box = box;
    this.charts = [];
    this.data = { steps: [], times: [], values: {} };
  }

  show(data, view) {
    this.data = data;
    this.#build(view);
    this.box.hidden = data.steps.length === 0;
    this.box.ariaLabel = `Metrics of ${data.steps.filter((step) => step !== null).length} steps on the same time axis. Newest: ` +
      this.charts.map(({ name }) => `${NAMES[name]} ${number(data.values[name].at(-1))}`).join(", ");
    this.charts.forEach(({ name, plot }) => plot.setData([data.times, data.values[name]]));
    this.point(null);
  }

  /** Follow the view; `redraw` alone, as no data changes. */
  draw(view) {
    for (const { plot } of this.charts) {
      if (plot.width !== this.box.clientWidth) plot.setSize({ width: this.box.clientWidth, height: HEIGHT });
      plot.setScale("x", { min: view.start, max: view.end });
    }
  }

  /** Say each metric's value at a time: of the newest step that was done by then. */
  point(time) {
    const { steps, times, values } = this.data;
    let at = times.length - 1;
    while (at >= 0 && (steps[at] === null || (time !== null && times[at] > time))) at -= 1;
    for (const { name, caption } of this.charts) {
      caption.replaceChildren(NAMES[name], bold(number(values[name][at])), at < 0 ? "" : `step ${steps[at]}`);
    }
  }

  rebuild(view) {
    this.charts.forEach(({ plot }) => plot.destroy());
    this.box.replaceChildren();
    this.charts = [];
    this.show(this.data, view);
  }

  #build(view) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    for (const name of Object.keys(this.data.values)) {
      if (this.charts.some((chart) => chart.name === name)) continue;
      const frame = document.createElement("div");
      const caption = document.createElement("p");
      frame.className = "metric";
      this.box.append(frame);
      const plot = new uPlot(
        {
          width: this.box.clientWidth,
          height: HEIGHT,
          padding: [10, 0, 10, GUTTER],
          legend: { show: false },
          cursor: { show: false },
          scales: { x: { time: true, auto: false, min: view.start, max: view.end }, y: { range: spread } },
          axes: [
            { show: false },
            { side: 1, size: MARGIN, font, stroke: colour("muted"), gap: 8, ticks: { show: false }, space: 24,
              grid: { stroke: colour("line"), width: 1 }, values: (_, marks) => marks.map(number) },
          ],
          series: [{}, { stroke: colour("accent"), width: 1.5, points: { show: (u) => points(u), size: 5, fill: colour("surface") } }],
        },
        [[], []],
        frame,
      );
      frame.prepend(caption);
      this.charts.push({ name, plot, caption });
    }
  }
}

const points = (plot) => plot.data[0].filter((at) => at >= plot.scales.x.min && at <= plot.scales.x.max).length < 80;

function spread(_, low, high) {
  if (low === null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.12;
  return [low - room, high + room];
}

function bold(text) {
  const element = document.createElement("b");
  element.textContent = text;
  return element;
}
