// A chart: uPlot draws; a legend, a text for screen readers and a table say the same.

import { element, fill, table } from "./panels.js";

/* global uPlot */

const HEIGHT = 150;
const MAX_TABLE_ROWS = 24;
const FONT_PX = 11;
const MIN_TICK_PX = 64;

// A canvas knows no custom properties of CSS: an element resolves them.
const probe = element("span", undefined, { hidden: "" });
document.body.append(probe);

function colour(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

function style(kind, nth) {
  if (kind === "second") return { stroke: colour("--muted"), width: 1.25, dash: [4, 3] };
  if (kind === "area") return { stroke: colour("--accent"), width: 1.5, fill: colour("--wash") };
  if (kind === "stack") return { stroke: colour(`--stack-${(nth % 4) + 1}`), width: 1, fill: colour(`--stack-${(nth % 4) + 1}`) };
  return { stroke: colour("--accent"), width: 1.75 };
}

const sum = (columns) => columns[0].map((_, row) => columns.reduce((total, column) => (column[row] === null || total === null ? null : total + column[row]), 0));

export class Chart {
  #plot = null;
  #data = null;

  // format: of values; x: of what is on the horizontal axis, and tick: the same in few characters, given the axis's
  // range; max: of the vertical axis; isLog: the horizontal axis is logarithmic, and its ticks are the xs; isBytes: the
  // vertical axis is in bytes.
  constructor(parent, spec) {
    this.spec = spec;
    this.figure = element("figure", undefined, { id: `chart-${spec.id}` });
    const caption = element("figcaption");
    caption.append(element("h3", spec.title), element("span", spec.note, { class: "note" }));
    this.legend = element("div", undefined, { class: "legend" });
    this.canvas = element("div", undefined, { class: "plot", role: "img" });
    this.details = element("details");
    this.table = element("div", undefined, { class: "scroll" });
    this.details.append(element("summary", "Table", { "aria-label": `Table of ${spec.title}` }), this.table);
    this.details.addEventListener("toggle", () => this.#fillTable());
    this.figure.append(caption, this.legend, this.canvas, this.details);
    parent.append(this.figure);
    new ResizeObserver(() => this.#plot && this.canvas.clientWidth && this.#plot.setSize({ width: this.canvas.clientWidth, height: HEIGHT })).observe(this.canvas);
  }

  // data: xs; range: the ends of the horizontal axis; row: that the legend shows; marks: [x, text] of vertical lines;
  // lines: [label, kind, values] each, of kind "main", "second", "area", or "stack": areas on top of each other.
  update(data) {
    const lines = data.lines.map(([label, kind, values]) => ({ label, kind, values }));
    const isSame = this.#plot && this.#data.lines.map(({ label }) => label).join("\n") === lines.map(({ label }) => label).join("\n");
    this.#data = { ...data, lines };
    if (isSame) this.#plot.setData(this.#columns());
    else this.#make();
    this.#showLegend(data.row);
    this.#describe();
    this.#fillTable();
  }

  // Draws with the colours of another theme.
  restyle() {
    if (this.#data) this.#make();
  }

  #columns() {
    const { xs, lines } = this.#data;
    const stacked = lines.filter(({ kind }) => kind === "stack").map(({ values }) => values);
    // The sum of all is drawn first, and what is below it on top.
    const columns = lines.map(({ kind, values }, nth) => (kind === "stack" ? sum(stacked.slice(0, nth + 1)) : values));
    return [xs, ...(stacked.length ? columns.reverse() : columns)];
  }

  #make() {
    const { spec } = this;
    this.#plot?.destroy();
    const lines = this.#data.lines.map(({ label, kind }, nth) => ({ label, ...style(kind, nth), points: { show: spec.isLog ?? this.#isIsolated, size: 5 } }));
    if (this.#data.lines[0].kind === "stack") lines.reverse();
    const axis = { stroke: colour("--muted"), font: `${FONT_PX}px system-ui, sans-serif`, ticks: { show: false } };
    const splits = spec.isLog ? { splits: () => this.#data.xs, filter: (plot, ticks) => this.#fitting(plot, ticks) } : {};
    this.#plot = new uPlot(
      {
        width: Math.max(120, this.canvas.clientWidth),
        height: HEIGHT,
        padding: [16, 24, 0, 0], // A tick's text is centred, so half of the last one stands to the right of the plot.
        legend: { show: false },
        cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
        scales: {
          x: { time: !spec.isLog, ...(spec.isLog ? { distr: 3, log: 2 } : {}), range: () => this.#data.range },
          y: { range: (_, __, most) => [0, spec.max ?? (most > 0 ? most * 1.08 : 1)] },
        },
        series: [{}, ...lines],
        axes: [
          { ...axis, ...splits, grid: { show: false }, size: 26, space: MIN_TICK_PX, values: (_, ticks) => ticks.map((x) => (x === null ? "" : spec.tick(x, this.#data.range))) },
          {
            ...axis,
            grid: { stroke: colour("--line"), width: 1 },
            size: (plot, ticks) => 14 + Math.max(28, ...(ticks ?? []).map((text) => widthOf(plot, text))),
            space: 36,
            ...(spec.isBytes ? { splits: (_, __, low, high) => byteSplits(high) } : {}),
            values: (_, ticks) => ticks.map((value) => spec.format(value).replace(/\.0+ /, " ")),
          },
        ],
        hooks: {
          draw: [(plot) => this.#data.marks.forEach(([x, text]) => mark(plot, x, text))],
          setCursor: [({ cursor }) => this.#showLegend(cursor.idx ?? this.#data.row, typeof cursor.idx === "number")],
        },
      },
      this.#columns(),
      this.canvas,
    );
  }

  // Without the ticks that would overlap; that of the legend's row is one of those that stay.
  #fitting({ bbox }, ticks) {
    const stride = Math.ceil((MIN_TICK_PX * devicePixelRatio * (ticks.length - 1)) / bbox.width);
    return ticks.map((x, nth) => ((nth - this.#data.row) % stride ? null : x));
  }

  // Whether a line has only points between two gaps, which are drawn as dots.
  #isIsolated = ({ data }, nth) => data[nth].every((value, row) => value === null || ((data[nth][row - 1] ?? null) === null && (data[nth][row + 1] ?? null) === null));

  #showLegend(row, isPointed = false) {
    const parts = this.#data.lines.map(({ label, kind, values }, nth) => {
      const item = element("span");
      item.append(element("i", undefined, { class: `mark ${kind === "stack" ? `stack-${(nth % 4) + 1}` : kind}` }), `${label} `, element("b", this.spec.format(values[row])));
      return item;
    });
    // The main line is drawn last, on top; the legend names it first.
    if (this.#data.lines[0].kind !== "stack") parts.reverse();
    if (isPointed || this.spec.isLog) parts.push(element("span", this.spec.x(this.#data.xs[row]), { class: "at" }));
    fill(this.legend, ...parts);
  }

  #describe() {
    const texts = this.#data.lines.map(({ label, values }) => {
      const known = values.filter((value) => value !== null);
      if (!known.length) return `${label}: no data`;
      return `${label}: now ${this.spec.format(values[this.#data.row])}, lowest ${this.spec.format(Math.min(...known))}, highest ${this.spec.format(Math.max(...known))}`;
    });
    const marks = this.#data.marks.map(([x, text]) => `${text}: ${this.spec.x(x)}`);
    this.canvas.setAttribute("aria-label", `Chart of ${this.spec.title}, ${this.spec.note}. ${[...texts, ...marks].join(". ")}`);
  }

  #fillTable() {
    if (!this.details.open) return;
    const { xs, lines } = this.#data;
    const stride = Math.ceil(xs.length / MAX_TABLE_ROWS);
    const rows = [];
    for (let row = xs.length - 1; row >= 0; row -= stride) rows.push([this.spec.x(xs[row]), ...lines.map(({ values }) => this.spec.format(values[row]))]);
    const columns = [[this.spec.isLog ? "Memory" : "Time"], ...lines.map(({ label }) => [label])];
    fill(this.table, table(this.spec.title, columns, rows, ""));
  }
}

function widthOf({ ctx }, text) {
  ctx.save();
  ctx.font = `${FONT_PX}px system-ui, sans-serif`;
  const { width } = ctx.measureText(text);
  ctx.restore();
  return width;
}

// A vertical line with a text above it.
function mark(plot, x, text) {
  const { ctx, bbox } = plot;
  const at = Math.round(plot.valToPos(x, "x", true)) + 0.5;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour("--muted");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(at, bbox.top);
  ctx.lineTo(at, bbox.top + bbox.height);
  ctx.stroke();
  ctx.font = `${FONT_PX * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  ctx.fillText(text, at, bbox.top - 5 * devicePixelRatio);
  ctx.restore();
}

// Whole steps of a power of two.
function byteSplits(high) {
  const step = 2 ** Math.ceil(Math.log2(Math.max(1, high / 4)));
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, nth) => nth * step);
}
