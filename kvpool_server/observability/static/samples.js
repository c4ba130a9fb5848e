// Samples of counters and gauges, and what charts make of them: rates, ratios, quantiles.

const KEPT_S = 3600;
const INTERVAL_S = 10;
const GAP_S = 25;

// The samples of the last hour, oldest first. A restart of the server begins new counters, so an empty sample, which is
// a gap in each line, stands between the samples of two starts.
export class Samples {
  kept = [];

  // Whether the server has samples that are not here: of another start, or of a time when this page did not ask.
  misses(sample) {
    const newest = this.kept.at(-1);
    return !newest || newest.boot !== sample.boot || sample.time - newest.time > GAP_S;
  }

  add(samples) {
    for (const sample of samples) {
      // The clock of another start may be behind: its samples replace those with later times.
      if (this.kept.at(-1)?.boot !== sample.boot) this.kept = this.kept.filter(({ time }) => time < sample.time);
      const newest = this.kept.at(-1);
      if (newest && sample.time < newest.time + INTERVAL_S / 2) continue;
      if (newest && (newest.boot !== sample.boot || sample.time - newest.time > GAP_S)) this.kept.push({ time: (newest.time + sample.time) / 2 });
      this.kept.push(sample);
    }
    const from = (this.kept.at(-1)?.time ?? 0) - KEPT_S;
    this.kept = this.kept.filter(({ time }) => time >= from);
  }

  // When each start of the server but the first one that is known here began.
  restarts() {
    const boots = this.kept.filter(({ boot }) => boot);
    return boots.filter(({ boot }, row) => row && boot !== boots[row - 1].boot).map(({ time }) => time);
  }
}

export const gauge = (samples, name) => samples.map((sample) => sample[name] ?? null);

// For each sample, what `compare` returns of it and the sample `rows` before, or the oldest since the last gap; null at gaps.
function compared(samples, rows, compare) {
  return samples.map((sample, row) => {
    let before = row - 1;
    while (before > row - rows && samples[before - 1]?.boot === sample.boot) before -= 1;
    return sample.boot && samples[before]?.boot === sample.boot ? compare(sample, samples[before]) : null;
  });
}

// How a counter has grown since the sample before. `pick` returns the counter of a sample.
const growth = (samples, pick) => compared(samples, 1, (sample, before) => Math.max(0, pick(sample) - pick(before)));

export const rate = (samples, pick, rows = 1) => compared(samples, rows, (sample, before) => Math.max(0, pick(sample) - pick(before)) / (sample.time - before.time));

export function ratio(samples, part, whole) {
  const wholes = growth(samples, (sample) => sample[whole]);
  return growth(samples, (sample) => sample[part]).map((grown, row) => (wholes[row] ? Math.min(1, grown / wholes[row]) : null));
}

// A quantile of the time of lookups since the sample before, in seconds.
export function lookupQuantile(samples, bounds, share) {
  const growths = [...bounds, null].map((_, nth) => growth(samples, (sample) => sample.lookup_buckets[nth] ?? 0));
  return samples.map((_, row) => quantile(bounds, growths.map((growth) => growth[row]), share));
}

// By linear interpolation within the bucket, as Prometheus does; null without observations. The last bucket has no bound.
function quantile(bounds, counts, share) {
  const wanted = share * counts.reduce((sum, count) => sum + count, 0);
  if (!wanted) return null;
  let below = 0;
  for (const [nth, bound] of bounds.entries()) {
    const low = nth ? bounds[nth - 1] : 0;
    if (counts[nth] && below + counts[nth] >= wanted) return low + ((bound - low) * (wanted - below)) / counts[nth];
    below += counts[nth];
  }
  return bounds.at(-1) ?? null;
}
