// Samples of counters and gauges, and what charts make of them: rates, ratios, quantiles.
// A restart of the server begins new counters: a row of gaps keeps the samples of two boots apart.

export const SPAN_SECONDS = { "15m": 900, "1h": 3600, "6h": 6 * 3600, "24h": 24 * 3600, "7d": 7 * 24 * 3600 };
const GAP_FACTOR = 2.5;

export const nameOf = (...key) => JSON.stringify(key);

export class Series {
  constructor(span) {
    this.span = span;
    this.intervalSeconds = 10;
    this.times = [];
    this.values = new Map(); // name -> numbers and nulls, one a time
    this.boot = "";
  }

  // When the newest sample of a boot was taken; 0 if there is none.
  newest(boot) {
    return boot === this.boot && this.times.length ? this.times[this.times.length - 1] : 0;
  }

  // Appends a part of the server's history.
  add(part) {
    this.intervalSeconds = part.interval_seconds;
    const columns = part.series.map(({ key, values }) => [nameOf(...key), values]);
    part.times.forEach((at, row) => {
      const last = this.times.length ? this.times[this.times.length - 1] : 0;
      if (at <= last) return;
      const isRestart = this.boot !== "" && part.boot !== this.boot;
      if (last && (isRestart || at - last > GAP_FACTOR * this.intervalSeconds)) this.#append((last + at) / 2, []);
      this.boot = part.boot;
      this.#append(at, columns.map(([name, values]) => [name, values[row]]));
    });
    this.#forget();
  }

  #append(at, row) {
    const count = this.times.length;
    this.times.push(at);
    for (const [name, value] of row) {
      if (!this.values.has(name)) this.values.set(name, new Array(count).fill(null));
      this.values.get(name).push(value);
    }
    for (const values of this.values.values()) if (values.length <= count) values.push(null);
  }

  #forget() {
    if (!this.times.length) return;
    const from = this.times[this.times.length - 1] - SPAN_SECONDS[this.span];
    const first = this.times.findIndex((at) => at >= from);
    if (first <= 0) return;
    this.times.splice(0, first);
    for (const values of this.values.values()) values.splice(0, first);
  }

  // The same samples with that of now behind them, if the newest one is old enough for a rate of its own.
  withNow(now) {
    const last = this.times.length ? this.times[this.times.length - 1] : 0;
    if (now.time - last < Math.min(5, this.intervalSeconds / 2)) return this;
    const copy = new Series(this.span);
    copy.intervalSeconds = this.intervalSeconds;
    copy.boot = this.boot;
    copy.times = this.times.slice();
    for (const [name, values] of this.values) copy.values.set(name, values.slice());
    copy.add({
      boot: now.boot,
      interval_seconds: this.intervalSeconds,
      times: [now.time],
      series: now.sample.map(({ key, value }) => ({ key, values: [value] })),
    });
    return copy;
  }

  gauge(...key) {
    return this.values.get(nameOf(...key)) ?? new Array(this.times.length).fill(null);
  }

  // By how much a counter has grown since the sample before; null across gaps. A counter that comes up begins at 0.
  growth(...key) {
    const values = this.values.get(nameOf(...key));
    let before = 0;
    return this.times.map((_, row) => {
      const value = values?.[row] ?? null;
      if (row === 0 || this.#isGap(row) || this.#isGap(row - 1)) {
        before = value ?? 0;
        return null;
      }
      if (value === null) return 0;
      const grown = value - before;
      before = value;
      return grown >= 0 ? grown : null;
    });
  }

  #isGap(row) {
    const arena = this.values.get(nameOf("arena_bytes"));
    return !arena || arena[row] === null;
  }

  rate(...key) {
    return this.growth(...key).map((grown, row) => (grown === null ? null : grown / (this.times[row] - this.times[row - 1])));
  }

  ratio(part, whole) {
    return part.map((value, row) => (value === null || !whole[row] ? null : Math.min(1, value / whole[row])));
  }

  // Growth of a counter over all rows; restarts count from 0.
  total(...key) {
    return this.growth(...key).reduce((sum, grown) => sum + (grown ?? 0), 0);
  }

  // The last part of each key that begins with `prefix`.
  under(...prefix) {
    const found = [];
    for (const name of this.values.keys()) {
      const key = JSON.parse(name);
      if (key.length === prefix.length + 1 && prefix.every((part, nth) => key[nth] === part)) found.push(key[prefix.length]);
    }
    return found;
  }

  // A quantile of a histogram's observations between each two samples, in seconds; null where there were none.
  quantile(name, share) {
    const bounds = this.under(name).sort((one, other) => bound(one) - bound(other));
    const growths = bounds.map((text) => this.growth(name, text));
    return this.times.map((_, row) => quantileOf(bounds.map(bound), growths.map((growth) => growth[row]), share));
  }
}

const bound = (text) => (text === "+Inf" ? Infinity : Number(text));

// By linear interpolation within the bucket, as Prometheus does. `counts` are cumulative.
export function quantileOf(bounds, counts, share) {
  const total = counts[counts.length - 1];
  if (!total) return null;
  const nth = counts.findIndex((count) => count >= share * total);
  if (bounds[nth] === Infinity) return nth ? bounds[nth - 1] : null;
  const [low, before] = nth ? [bounds[nth - 1], counts[nth - 1]] : [0, 0];
  return low + ((bounds[nth] - low) * (share * total - before)) / Math.max(1e-9, counts[nth] - before);
}
