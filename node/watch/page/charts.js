"use strict";
// Charts of the page, drawn by uPlot. Each has axis labels, a line of text with its numbers, and a cursor for the arrow keys.
/* global uPlot */

const HEIGHT = 250;
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400]; // between marks of time, s

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function clock(seconds) {
  const s = Math.round(seconds), two = (value) => String(value).padStart(2, "0");
  return s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size >= 1000 ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : Number(value.toPrecision(3)).toString();
}

// One chart in the element `host`. `describe(chart, index)` returns the line of text for a point of it.
class Chart {
  constructor(host, { x, y, time = false, value = short, band = false, name, from_zero = false }) {
    this.host = host;
    this.options = { x, y, time, value, band, name, from_zero };
    this.plot = this.kind = null;
    this.chosen = null; // place of the cursor, if a key or the mouse put it somewhere
    this.area = document.createElement("div");
    this.area.tabIndex = 0;
    this.area.setAttribute("role", "group");
    this.area.setAttribute("aria-label", `Chart: ${name}. ${y} by ${x}. Left and right arrow keys read its points.`);
    this.text = document.createElement("p");
    this.text.className = "readout";
    this.text.id = `${host.id}-text`;
    this.area.setAttribute("aria-describedby", this.text.id);
    this.host.append(this.area, this.text);
    this.area.addEventListener("keydown", (event) => this.key(event));
    this.area.addEventListener("blur", () => { this.chosen = null; this.text.removeAttribute("aria-live"); this.say(); });
  }

  // `lines`: [{label, data, colour, width, faded}], drawn in this order; `data`: {x, low, high}.
  show(data, lines, faint) {
    this.data = data;
    this.lines = lines;
    const width = Math.max(this.host.clientWidth, 240);
    const kind = JSON.stringify([faint, this.options.y, lines.map(({ label, colour, width: thick, faded }) => [label, colour, thick, faded])]);
    const { band } = this.options;
    const values = [data.x, ...(band ? [data.low, data.high] : []), ...lines.map((line) => line.data)];
    if (this.plot && this.kind === kind) {
      if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
      this.plot.setData(values);
    } else {
      this.plot?.destroy();
      this.kind = kind;
      this.plot = new uPlot(this.settings(width), values, this.area);
    }
    this.say();
  }

  settings(width) {
    const { x, y, time, value, band, from_zero } = this.options;
    const text = style("--faint"), line = style("--line"), font = "12px system-ui, sans-serif";
    const axis = { stroke: text, font, labelFont: font, labelSize: 18, labelGap: 0, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 5 } };
    const hidden = { stroke: "transparent", width: 0, points: { show: false } };
    return {
      width, height: HEIGHT, legend: { show: false }, padding: [8, 14, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: (plot, low, high) => this.range(low, high, from_zero) } },
      axes: [
        { ...axis, label: x, size: 34, space: 60, ...(time ? { incrs: STEPS, values: (plot, marks) => marks.map(clock) } : { incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 1e4, 1e5, 1e6] }) },
        { ...axis, label: y, size: 66, space: 40, values: (plot, marks) => marks.map(value) },
      ],
      series: [
        {}, ...(band ? [hidden, hidden] : []),
        ...this.lines.map((each) => ({ stroke: each.colour, width: each.width, alpha: each.faded ? 0.2 : 1, points: { show: (plot, index) => plot.data[index].filter((v) => v !== null).length === 1 }, spanGaps: false })),
      ],
      bands: band ? [{ series: [2, 1], fill: style("--band") }] : [],
      hooks: { setCursor: [(plot) => this.moved(plot.cursor.idx)] },
    };
  }

  range(low, high, from_zero) {
    if (low === null || high === null || low === undefined) return [0, 1];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [from_zero ? 0 : low - room, high + room];
  }

  key(event) {
    const last = this.data.x.length - 1, at = this.chosen ?? last;
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last, PageUp: at + 10, PageDown: at - 10 }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    this.text.setAttribute("aria-live", "polite");
    this.chosen = Math.min(Math.max(next, 0), last);
    const x = this.plot.valToPos(this.data.x[this.chosen], "x");
    this.plot.setCursor({ left: x, top: HEIGHT / 3 }, false);
    this.say();
  }

  moved(index) {
    this.chosen = index ?? null;
    this.say();
  }

  say() {
    if (!this.data || !this.plot) return;
    const { x, time, value, band } = this.options, at = this.chosen === null ? this.data.x.length - 1 : this.chosen;
    if (at < 0 || at >= this.data.x.length) {
      this.text.textContent = "Nothing yet.";
      return;
    }
    const where = time ? `After ${clock(this.data.x[at])}` : `${x[0].toUpperCase()}${x.slice(1)} ${short(this.data.x[at])}`;
    const told = this.lines.filter((line) => line.told).map((line) => `${line.label} ${value(line.data[at])}`);
    const low = band ? this.data.low[at] : null;
    const span = low !== null && low !== undefined ? `, peers from ${value(low)} to ${value(this.data.high[at])}` : "";
    this.text.textContent = `${where}: ${told.join(", ")}${span}.`;
  }
}
