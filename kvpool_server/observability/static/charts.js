// What each chart shows.

import { Chart } from "./chart.js";
import * as format from "./format.js";
import { element, fill, note } from "./panels.js";
import { gauge, lookupQuantile, rate, ratio } from "./samples.js";

const MIN_SPAN_S = 60;
const SPAN_S = 3600;
const PRESENT = 1;
const REPORTED_ROWS = 6; // Engines report about as often as the server takes samples.
const OFF = "The server was started with `--value-sample 0` and estimates nothing.";
const EMPTY = "Nothing was looked up since the server started.";

const rateOf = (samples, name, rows) => rate(samples, (sample) => sample[name], rows);
const SHORT_SPAN_S = 300;
const ofTime = { x: format.clock, tick: (at, [from, to]) => format.clock(at).slice(0, to - from < SHORT_SPAN_S ? 8 : 5) };

// lines: [label, kind, values] of the samples and the snapshot of now; the main line is the last one.
const CHARTS = [
  {
    id: "saved", title: "Time saved", note: "seconds per second, as engines estimate",
    format: (value) => (typeof value === "number" ? `${value.toFixed(2)} s/s` : format.NONE),
    lines: (samples) => [["lost", "second", rateOf(samples, "lost_seconds", REPORTED_ROWS)], ["saved", "main", rateOf(samples, "saved_seconds", REPORTED_ROWS)]],
  },
  {
    id: "hit-ratio", title: "Hit ratio", note: "of the tokens that lookups asked for", format: format.percent, max: 1,
    lines: (samples) => [["hits", "main", ratio(samples, "hit_tokens", "lookup_tokens")]],
  },
  {
    id: "lookups", title: "Lookups", note: "per second", format: format.perSecond,
    lines: (samples) => [["lookups", "main", rateOf(samples, "lookups")]],
  },
  {
    id: "latency", title: "Lookup latency", note: "in the server", format: format.seconds,
    lines: (samples, { server }) => [["p99", "second", lookupQuantile(samples, server.rpc_seconds_bounds, 0.99)], ["p50", "main", lookupQuantile(samples, server.rpc_seconds_bounds, 0.5)]],
  },
  {
    id: "throughput", title: "Blocks moved", note: "loaded by engines, and stored", format: format.bytesPerSecond,
    lines: (samples) => [["stored", "second", rateOf(samples, "stored_bytes")], ["loaded", "main", rateOf(samples, "loaded_bytes")]],
  },
  {
    id: "arena", title: "Arena", note: "in use, of its size", format: format.bytes, isBytes: true,
    lines: (samples) => [["size", "second", gauge(samples, "arena_bytes")], ["in use", "area", samples.map((sample) => (sample.boot ? sample.arena_bytes - sample.free_bytes : null))]],
  },
  {
    id: "sources", title: "Where hits come from", note: "blocks per second", format: format.perSecond,
    lines: (samples) => {
      const tiers = [...new Set(samples.flatMap((sample) => Object.keys(sample.promoted_blocks ?? {})))]; // Earlier starts' too.
      const promoted = tiers.map((tier) => rate(samples, (sample) => sample.promoted_blocks[tier] ?? 0));
      const memory = rateOf(samples, "lookup_hits").map((hits, row) => (hits === null ? null : Math.max(0, hits - promoted.reduce((sum, column) => sum + column[row], 0))));
      return [["memory", "stack", memory], ...tiers.map((tier, nth) => [tier, "stack", promoted[nth]])];
    },
  },
  {
    id: "evictions", title: "Evictions", note: "blocks per second", format: format.perSecond,
    lines: (samples) => [["for a quota", "second", rateOf(samples, "quota_evicted_blocks")], ["all", "main", rateOf(samples, "evicted_blocks")]],
  },
  {
    id: "loop-lag", title: "Event loop lag", note: "the wait of a request before the server reads it", format: format.seconds,
    lines: (samples) => [["p99", "second", gauge(samples, "loop_lag_p99_seconds")], ["p50", "main", gauge(samples, "loop_lag_p50_seconds")]],
  },
];

// The charts of the last hour; of the time since the first sample, while the server is younger.
export class HourCharts {
  constructor(title, parent) {
    this.title = title;
    this.charts = CHARTS.map((spec) => new Chart(parent, { ...spec, ...ofTime }));
  }

  update(samples, restarts, { sample, stats }) {
    const to = sample.time;
    const from = Math.max(to - SPAN_S, Math.min(samples[0].time, to - MIN_SPAN_S));
    this.title.textContent = `Last ${format.duration(to - from)}`;
    const marks = restarts.map((at) => [at, "restart"]);
    const xs = samples.map(({ time }) => time);
    for (const chart of this.charts) chart.update({ xs, range: [from, to], row: xs.length - 1, marks, lines: chart.spec.lines(samples, stats) });
  }
}

const nameOf = (curve) => (curve.is_total ? "all tenants" : curve.tenant || "(no tenant)");

// Hit ratio by memory, as the server estimates it: of all tenants, or of one.
export class ValueCurve {
  #report = null;

  constructor(parent) {
    this.why = note("");
    this.choice = element("select", undefined, { id: "value-tenant" });
    this.choice.addEventListener("change", () => this.update(this.#report));
    this.choices = element("p", undefined, { class: "note", hidden: "" });
    this.choices.append(element("label", "Tenant ", { for: "value-tenant" }), this.choice);
    parent.append(this.choices);
    const x = (bytes) => `${format.bytes(bytes)}${bytes === this.#report.arena_bytes ? " (now)" : ""}`;
    this.chart = new Chart(parent, {
      id: "value", title: "Hit ratio by memory", note: "of the tokens that lookups asked for, as estimated under LRU",
      format: format.percent, max: 1, isLog: true, x, tick: format.bytes,
    });
    parent.append(this.why);
    this.chart.figure.hidden = true;
  }

  update(report) {
    this.#report = report;
    const curve = report.curves.find((each) => nameOf(each) === this.choice.value) ?? report.curves[0];
    const isDrawn = Boolean(curve?.estimates.length);
    this.chart.figure.hidden = !isDrawn;
    this.choices.hidden = report.curves.length < 3; // Without a choice between two tenants.
    this.why.hidden = isDrawn;
    fill(this.why, ...format.withCode(report.enabled ? EMPTY : OFF));
    fill(this.choice, ...report.curves.map((each) => element("option", nameOf(each))));
    if (!isDrawn) return;
    this.choice.value = nameOf(curve);
    const { estimates } = curve;
    const xs = estimates.map(({ size }) => size * report.arena_bytes);
    const tiers = report.has_tiers ? [["with tiers", "second", estimates.map((each) => each.hit_ratio_with_tiers)]] : [];
    const lines = [...tiers, ["in memory", "main", estimates.map((each) => each.hit_ratio)]];
    const row = estimates.findIndex(({ size }) => size === PRESENT);
    this.chart.update({ xs, range: [xs[0], xs.at(-1)], row, marks: [[report.arena_bytes, "now"]], lines });
  }
}
