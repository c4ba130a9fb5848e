// The charts: what each shows, and how it is drawn. uPlot draws; text and tables beside each canvas say the same.

import * as format from "./format.js";

/* global uPlot */

const HEIGHT = 150;
const MAX_TABLE_ROWS = 24;

const sum = (columns) => columns[0].map((_, row) => columns.reduce((total, column) => (column[row] === null ? null : total === null ? null : total + column[row]), 0));

// Of a histogram: what half of all, and all but one in a hundred, did not exceed.
const quantiles = (name) => (series) => [
  { label: "p99", kind: "second", values: series.quantile(name, 0.99) },
  { label: "p50", kind: "main", values: series.quantile(name, 0.5) },
];

// Each chart: id, title, unit in words, format of its values, and lines(series) -> [{label, values, kind}].
// kind: "main", "second", or "stack": areas on top of each other, in the order given.
export const CHARTS = [
  {
    id: "hit-ratio",
    title: "Hit ratio",
    note: "of the tokens that lookups asked for",
    format: format.percent,
    max: 1,
    lines: (series) => [{ label: "hits", kind: "main", values: series.ratio(series.growth("hit_tokens"), series.growth("lookup_tokens")) }],
  },
  {
    id: "lookups",
    title: "Lookups",
    note: "a second",
    format: format.perSecond,
    lines: (series) => [{ label: "lookups", kind: "main", values: series.rate("lookups") }],
  },
  {
    id: "latency",
    title: "Lookup latency",
    note: "in the server",
    format: format.seconds,
    lines: quantiles("lookup_seconds"),
  },
  {
    id: "throughput",
    title: "Blocks moved",
    note: "loaded by engines, and stored",
    format: format.bytesPerSecond,
    lines: (series) => [
      { label: "stored", kind: "second", values: series.rate("stored_bytes") },
      { label: "loaded", kind: "main", values: series.rate("loaded_bytes") },
    ],
  },
  {
    id: "arena",
    title: "Arena",
    note: "in use, of its size",
    format: format.bytes,
    binary: true,
    lines: (series) => {
      const size = series.gauge("arena_bytes");
      const free = series.gauge("free_bytes");
      const used = size.map((value, row) => (value === null || free[row] === null ? null : value - free[row]));
      return [
        { label: "size", kind: "second", values: size },
        { label: "in use", kind: "area", values: used },
      ];
    },
  },
  {
    id: "sources",
    title: "Where hits come from",
    note: "blocks a second",
    format: format.perSecond,
    lines: (series, now) => {
      const tiers = now.tiers.map((tier) => tier.tier);
      const promoted = tiers.map((tier) => series.rate("tier", tier, "promoted_blocks"));
      const hits = series.rate("lookup_hits");
      const memory = hits.map((value, row) => {
        const up = promoted.reduce((total, column) => total + (column[row] ?? 0), 0);
        return value === null ? null : Math.max(0, value - up);
      });
      return [
        { label: "memory", kind: "stack", values: memory },
        ...tiers.map((tier, nth) => ({ label: tier, kind: "stack", values: promoted[nth] })),
      ];
    },
  },
  {
    id: "evictions",
    title: "Evictions",
    note: "blocks a second",
    format: format.perSecond,
    lines: (series) => [
      { label: "for a quota", kind: "second", values: series.rate("quota_evicted_blocks") },
      { label: "to make room", kind: "main", values: series.rate("evicted_blocks") },
    ],
  },
  {
    id: "saved",
    title: "Seconds saved",
    note: "GPU time a second, as engines estimate it",
    format: (value) => (typeof value === "number" ? `${value.toFixed(2)} s/s` : "–"),
    isShown: (now) => now.owners.some((owner) => owner.reported),
    lines: (series) => [
      { label: "lost", kind: "second", values: series.rate("lost_seconds") },
      { label: "saved", kind: "main", values: series.rate("saved_seconds") },
    ],
  },
  {
    id: "loop-lag",
    title: "Event loop lag",
    note: "what a request waits before it is looked at",
    format: format.seconds,
    lines: quantiles("loop_lag_seconds"),
  },
];

// A canvas knows no properties, and no light-dark(): an element resolves both.
const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);

export function colour(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

function style(kind, nth) {
  const accent = colour("--accent");
  if (kind === "second") return { stroke: colour("--muted"), width: 1.25, dash: [4, 3] };
  if (kind === "area") return { stroke: accent, width: 1.5, fill: colour("--wash") };
  if (kind === "stack") return { stroke: colour(`--stack-${(nth % 4) + 1}`), width: 1, fill: colour(`--stack-${(nth % 4) + 1}`) };
  return { stroke: accent, width: 1.75 };
}

export class Chart {
  #plot = null;
  #lines = [];
  #times = [];
  #signature = "";

  constructor(spec, parent) {
    this.spec = spec;
    this.figure = document.createElement("figure");
    this.figure.id = `chart-${spec.id}`;
    const caption = document.createElement("figcaption");
    const title = document.createElement("h3");
    title.textContent = spec.title;
    const note = document.createElement("span");
    note.className = "note";
    note.textContent = spec.note;
    caption.append(title, note);
    this.legend = document.createElement("div");
    this.legend.className = "legend";
    this.canvas = document.createElement("div");
    this.canvas.className = "plot";
    this.canvas.setAttribute("role", "img");
    this.details = document.createElement("details");
    const summary = document.createElement("summary");
    summary.textContent = "Table";
    summary.setAttribute("aria-label", `Table of ${spec.title}`);
    this.table = document.createElement("div");
    this.table.className = "scroll";
    this.details.append(summary, this.table);
    this.details.addEventListener("toggle", () => this.#fillTable());
    this.figure.append(caption, this.legend, this.canvas, this.details);
    parent.append(this.figure);
    new ResizeObserver(() => this.#fit()).observe(this.canvas);
  }

  // Draws again; `from` and `to` bound the axis of time.
  update(series, now, from, to) {
    this.figure.hidden = this.spec.isShown ? !this.spec.isShown(now) : false;
    if (this.figure.hidden) return;
    this.#times = series.times;
    this.#lines = this.spec.lines(series, now);
    this.range = [from, to];
    const signature = this.#lines.map((line) => line.label).join("\n");
    if (!this.#plot || signature !== this.#signature) {
      this.#signature = signature;
      this.#make();
    } else {
      this.#plot.setData(this.#data());
    }
    this.#describe(this.#lastRow());
    if (this.details.open) this.#fillTable();
  }

  // Draws with the colours of another theme.
  restyle() {
    if (this.#plot) {
      this.#make();
      this.#describe(this.#lastRow());
    }
  }

  #data() {
    const stacked = this.#lines.filter((line) => line.kind === "stack");
    // The sum of all is drawn first, and what is below it on top.
    const columns = this.#lines.map((line, nth) => (line.kind === "stack" ? sum(stacked.slice(0, nth + 1).map((each) => each.values)) : line.values));
    if (stacked.length) columns.reverse();
    return [this.#times, ...columns];
  }

  #make() {
    this.#plot?.destroy();
    const lines = this.#lines.map((line, nth) => ({ label: line.label, ...style(line.kind, nth), spanGaps: false, points: { show: this.#isolated } }));
    if (this.#lines.some((line) => line.kind === "stack")) lines.reverse();
    const grid = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: colour("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    this.#plot = new uPlot(
      {
        width: Math.max(120, this.canvas.clientWidth),
        height: HEIGHT,
        padding: [8, 10, 0, 0],
        legend: { show: false },
        cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
        scales: {
          x: { time: true, range: () => this.range },
          y: { range: (_, __, most) => [0, this.spec.max ?? (most > 0 ? most * 1.08 : 1)] },
        },
        series: [{}, ...lines],
        axes: [
          { ...axis, grid: { show: false }, size: 26, space: 64, values: (_, ticks) => ticks.map((at) => this.#tick(at)) },
          {
            ...axis,
            grid,
            size: (_, ticks) => 12 + 6.3 * Math.max(4, ...(ticks ?? []).map((text) => text.length)),
            space: 36,
            ...(this.spec.binary ? { splits: (_, __, low, high) => binarySplits(low, high) } : {}),
            values: (_, ticks) => ticks.map((value) => this.spec.format(value).replace(".00 ", " ").replace(".0 ", " ")),
          },
        ],
        hooks: { setCursor: [(plot) => this.#describe(plot.cursor.idx ?? this.#lastRow(), plot.cursor.idx !== null && plot.cursor.idx !== undefined)] },
      },
      this.#data(),
      this.canvas,
    );
  }

  // A point between two gaps is no line: it is drawn as a dot.
  #isolated = (plot, nth, first, last) => {
    const values = plot.data[nth];
    const rows = [];
    for (let row = first; row <= last; row += 1) {
      if (values[row] != null && values[row - 1] == null && values[row + 1] == null) rows.push(row);
    }
    return rows.length > 0 && rows.length === values.filter((value) => value != null).length;
  };

  #tick(at) {
    return this.range[1] - this.range[0] > 2 * 86400 ? format.day(at).slice(5) : format.clock(at).slice(0, 5);
  }

  #fit() {
    if (this.#plot && this.canvas.clientWidth > 0) this.#plot.setSize({ width: this.canvas.clientWidth, height: HEIGHT });
  }

  #lastRow() {
    return this.#times.length - 1;
  }

  // The legend, with the values of one row; and the same for those who do not see the canvas.
  #describe(row, isPointed = false) {
    const parts = this.#lines.map((line, nth) => {
      const item = document.createElement("span");
      const mark = document.createElement("i");
      mark.className = line.kind === "stack" ? `mark stack-${(nth % 4) + 1}` : `mark ${line.kind}`;
      const value = document.createElement("b");
      value.textContent = this.spec.format(line.values[row]);
      item.append(mark, `${line.label} `, value);
      return item;
    });
    // Lines are drawn in their order, the main one last and on top; the legend names it first.
    const isLast = ({ kind }) => kind === "main" || kind === "area";
    if (this.#lines.some(isLast)) parts.reverse();
    if (isPointed) {
      const at = document.createElement("span");
      at.className = "at";
      at.textContent = format.clock(this.#times[row]);
      parts.push(at);
    }
    this.legend.replaceChildren(...parts);
    if (isPointed) return;
    const texts = this.#lines.map((line) => {
      const values = line.values.filter((value) => value !== null);
      if (!values.length) return `${line.label}: no data`;
      return `${line.label}: now ${this.spec.format(line.values[row])}, lowest ${this.spec.format(Math.min(...values))}, highest ${this.spec.format(Math.max(...values))}`;
    });
    this.canvas.setAttribute("aria-label", `Chart of ${this.spec.title}, ${this.spec.note}. ${texts.join(". ")}`);
  }

  #fillTable() {
    if (!this.details.open) return;
    const stride = Math.max(1, Math.ceil(this.#times.length / MAX_TABLE_ROWS));
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    for (const title of ["Time", ...this.#lines.map((line) => line.label)]) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = title;
      head.append(cell);
    }
    const body = table.createTBody();
    for (let row = this.#lastRow(); row >= 0; row -= stride) {
      const line = body.insertRow();
      line.insertCell().textContent = format.moment(this.#times[row]).slice(this.range[1] - this.range[0] > 86400 ? 0 : 11);
      for (const { values } of this.#lines) line.insertCell().textContent = this.spec.format(values[row]);
    }
    this.table.replaceChildren(table);
  }
}

// Splits of an axis of bytes: whole steps of a power of two.
function binarySplits(low, high) {
  const step = 2 ** Math.ceil(Math.log2(Math.max(1, (high - low) / 4)));
  const splits = [];
  for (let at = 0; at <= high; at += step) splits.push(at);
  return splits;
}
