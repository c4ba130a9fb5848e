// The curve of hit ratio by memory, as the server simulates it: of all tenants, or of one.

import { colour } from "./charts.js";
import * as format from "./format.js";
import { element, note, table } from "./panels.js";

/* global uPlot */

const HEIGHT = 190;
const PRESENT = 1;
const OFF = "The server simulates no other sizes. Start it with `--value-sample 640`, and the curve is here.";
const EMPTY = "Nothing was looked up since the simulation began.";

const nameOf = (curve) => (curve.is_total ? "all tenants" : curve.is_rest ? "the rest" : curve.tenant || "(no tenant)");
const times = (size) => (size === PRESENT ? "now" : `${size}x`);

export class ValueCurve {
  #plot = null;
  #said = "";
  #report = null;
  #chosen = "all tenants";

  constructor(parent) {
    this.parent = parent;
    this.why = note("");
    this.choice = element("select", undefined, { id: "value-tenant" });
    this.choice.addEventListener("change", () => {
      this.#chosen = this.choice.value;
      this.#draw();
    });
    this.choices = element("p", undefined, { class: "note" });
    this.choices.append(element("label", "Tenant ", { for: "value-tenant" }), this.choice);
    this.figure = element("figure", undefined, { id: "chart-value" });
    const caption = element("figcaption");
    caption.append(element("h3", "Hit ratio by memory"), element("span", "of the tokens that lookups asked for, by simulation", { class: "note" }));
    this.legend = element("div", undefined, { class: "legend" });
    this.canvas = element("div", undefined, { class: "plot", role: "img" });
    const details = element("details");
    this.table = element("div", undefined, { class: "scroll" });
    details.append(element("summary", "Table", { "aria-label": "Table of Hit ratio by memory" }), this.table);
    this.figure.append(caption, this.legend, this.canvas, details);
    this.figure.hidden = this.choices.hidden = true; // Until there is a curve.
    parent.append(this.choices, this.figure, this.why);
    new ResizeObserver(() => this.#fit()).observe(this.canvas);
  }

  // A report of the server. One that says the same changes nothing.
  update(report) {
    const said = JSON.stringify([report.enabled, report.arena_bytes, report.curves]);
    if (said === this.#said) return;
    this.#said = said;
    this.#report = report;
    this.#draw();
  }

  // Draws with the colours of another theme.
  restyle() {
    if (this.#report) this.#draw();
  }

  #draw() {
    const curves = this.#report.curves;
    const curve = curves.find((each) => nameOf(each) === this.#chosen) ?? curves[0];
    const isDrawn = Boolean(curve?.estimates.length);
    this.figure.hidden = !isDrawn;
    this.choices.hidden = curves.length < 3; // Without a choice between two tenants.
    this.why.hidden = isDrawn;
    this.why.replaceChildren(...(this.#report.enabled ? EMPTY : OFF).split("`").map((part, nth) => (nth % 2 ? element("code", part) : part)));
    this.choice.replaceChildren(...curves.map((each) => element("option", nameOf(each))));
    if (curve) this.choice.value = nameOf(curve);
    if (!isDrawn) return;
    this.rows = curve.estimates.map((each) => ({ ...each, bytes: each.size * this.#report.arena_bytes }));
    this.#make();
    this.#describe(null);
    const columns = [["Memory", true], ["Of now", true], ["Hits", true], ...(this.#report.has_tiers ? [["With tiers", true]] : []), ["Off by, at most", true]];
    const cells = this.rows.map((row) => [
      format.bytes(row.bytes),
      times(row.size),
      format.percent(row.hit_ratio),
      ...(this.#report.has_tiers ? [format.percent(row.hit_ratio_with_tiers)] : []),
      `${(100 * row.uncertainty).toFixed(1)} points`,
    ]);
    this.table.replaceChildren(table(`Hit ratio by memory, ${nameOf(curve)}`, columns, cells));
    const texts = this.rows.map((row) => `${format.bytes(row.bytes)}: ${row.size === PRESENT ? "now " : ""}${format.percent(row.hit_ratio)}`);
    const present = texts.splice(this.rows.findIndex((row) => row.size === PRESENT), 1);
    this.canvas.setAttribute("aria-label", `Chart of hit ratio by memory, ${nameOf(curve)}. ${[...present, ...texts].join(", ")}`);
  }

  #make() {
    this.#plot?.destroy();
    const accent = colour("--accent");
    const muted = colour("--muted");
    const axis = { stroke: muted, font: "11px system-ui, sans-serif", ticks: { show: false } };
    const sizes = this.rows.map((row) => row.bytes);
    const present = this.#report.arena_bytes;
    const tiers = this.#report.has_tiers ? [this.rows.map((row) => row.hit_ratio_with_tiers)] : [];
    const bound = (sign) => this.rows.map((row) => Math.min(1, Math.max(0, row.hit_ratio + sign * row.uncertainty)));
    this.#plot = new uPlot(
      {
        width: Math.max(120, this.canvas.clientWidth),
        height: HEIGHT,
        padding: [16, 28, 0, 0],
        legend: { show: false },
        cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
        scales: { x: { time: false, distr: 3, log: 2, range: () => [sizes[0], sizes[sizes.length - 1]] }, y: { range: () => [0, 1] } },
        series: [
          {},
          { points: { show: false } },
          { points: { show: false } },
          ...tiers.map(() => ({ stroke: muted, width: 1.25, dash: [4, 3] })),
          { stroke: accent, width: 1.75, points: { show: true, size: 5, fill: accent } },
        ],
        bands: [{ series: [1, 2], fill: colour("--wash") }],
        axes: [
          { ...axis, grid: { show: false }, size: 26, space: 56, splits: () => sizes, values: (_, ticks) => ticks.map((value) => format.bytes(value)), filter: (_, ticks) => ticks },
          { ...axis, grid: { stroke: colour("--line"), width: 1 }, size: 50, space: 36, values: (_, ticks) => ticks.map((value) => format.percent(value).replace(".0 ", " ")) },
        ],
        hooks: {
          draw: [(plot) => markPresent(plot, present, muted)],
          setCursor: [(plot) => this.#describe(plot.cursor.idx ?? null)],
        },
      },
      [sizes, bound(1), bound(-1), ...tiers, this.rows.map((row) => row.hit_ratio)],
      this.canvas,
    );
  }

  #fit() {
    if (this.#plot && this.canvas.clientWidth > 0) this.#plot.setSize({ width: this.canvas.clientWidth, height: HEIGHT });
  }

  // The legend, with the values of one size; of the present one if none is pointed at.
  #describe(nth) {
    const row = this.rows[nth ?? this.rows.findIndex((each) => each.size === PRESENT)];
    if (!row) return;
    const item = (kind, text, value) => {
      const made = element("span");
      made.append(element("i", undefined, { class: `mark ${kind}` }), `${text} `, element("b", value));
      return made;
    };
    const tiers = this.#report.has_tiers ? [item("second", "with tiers", format.percent(row.hit_ratio_with_tiers))] : [];
    this.legend.replaceChildren(item("main", "in memory", format.percent(row.hit_ratio)), ...tiers, element("span", `${format.bytes(row.bytes)} (${times(row.size)})`, { class: "at" }));
  }
}

// A line at the present size.
function markPresent(plot, bytes, stroke) {
  const { ctx, bbox } = plot;
  const at = Math.round(plot.valToPos(bytes, "x", true)) + 0.5;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = stroke;
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(at, bbox.top);
  ctx.lineTo(at, bbox.top + bbox.height);
  ctx.stroke();
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  ctx.fillText("now", at, bbox.top - 4 * devicePixelRatio);
  ctx.restore();
}
