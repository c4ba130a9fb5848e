// Numbers as people read them, with units.

export const NONE = "–";

function scaled(value, step, units) {
  let size = value;
  let nth = 0;
  // 999.5 would round to 1000 of a unit.
  while (Math.abs(size) >= step * 0.9995 && nth < units.length - 1) {
    size /= step;
    nth += 1;
  }
  const digits = size === 0 || Math.abs(size) >= 100 || (nth === 0 && Number.isInteger(size)) ? 0 : Math.abs(size) >= 10 ? 1 : 2;
  return `${size.toFixed(digits)} ${units[nth]}`.trim();
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const bytes = (value) => (isNumber(value) ? scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]) : NONE);
export const bytesPerSecond = (value) => (isNumber(value) ? scaled(value, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]) : NONE);
export const count = (value) => (isNumber(value) ? scaled(value, 1000, ["", "k", "M", "G", "T"]) : NONE);
export const whole = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en-US") : NONE);

export function perSecond(value) {
  if (!isNumber(value)) return NONE;
  return value > 0 && value < 0.01 ? "< 0.01 /s" : `${scaled(value, 1000, ["", "k", "M", "G"])} /s`;
}

export function percent(ratio) {
  if (!isNumber(ratio)) return NONE;
  const value = ratio * 100;
  // A ratio that is not whole is not shown as 0 or 100 %.
  if (value > 0 && value < 0.1) return "< 0.1 %";
  if (value < 100 && value > 99.9) return "> 99.9 %";
  return `${value.toFixed(value === 0 || value === 100 ? 0 : 1)} %`;
}

export function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0 ms";
  if (value < 0.9995e-3) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0)} ms`;
  return value < 10 ? `${value.toFixed(2)} s` : duration(value);
}

export function duration(value) {
  if (!isNumber(value)) return NONE;
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (value >= 2 * length) return `${Math.round(value / length)} ${unit}`;
  }
  return `${Math.round(value)} s`;
}

const two = (value) => String(value).padStart(2, "0");

export function clock(at) {
  const date = new Date(at * 1000);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function day(at) {
  const date = new Date(at * 1000);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
}

export const moment = (at) => `${day(at)} ${clock(at)}`;

// Text whose commands stand in backquotes, as nodes.
export function withCode(text) {
  return text.split("`").map((part, nth) => {
    const node = document.createElement(nth % 2 ? "code" : "span");
    node.textContent = part;
    return node;
  });
}
