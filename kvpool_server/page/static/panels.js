// Everything beside the charts: tiles, tables, the state line. Text from the server becomes text nodes only.

import * as format from "./format.js";
import { quantileOf } from "./series.js";

export const CAUSES = {
  last_block: "the last token, which is always computed",
  never_stored: "never stored, or gone longer than remembered",
  being_written: "an engine was storing them",
  evicted: "evicted to make room",
  removed: "removed or cleared by request",
  corrupt: "their bytes had changed",
  put_failed: "the engine that stored them gave up",
  other_namespace: "only in another namespace: kvpool namespaces --diff",
  in_tier: "in a tier that was too slow",
  window_or_state: "the window or state before them is missing",
  declined: "loading would have taken longer",
  load_failed: "their load failed",
  lookup_failed: "their lookup failed or was late",
  too_many_waiting: "too many other requests waited",
  pool_away: "no connection to the pool",
  adapter: "of a LoRA adapter that is not shared",
  not_asked: "the request does not allow loading",
  sharing_off: "sharing was off",
};

const LEVELS = { ok: "OK", warning: "Warning", fault: "Fault", away: "Away" };

export function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// columns: [title, isNumber]; rows: of texts or elements. On a phone each row is a card, so cells name their column.
export function table(caption, columns, rows) {
  const made = element("table", undefined, { role: "table", class: "cards" });
  made.append(element("caption", caption, { class: "hidden" }));
  const head = element("thead", undefined, { role: "rowgroup" });
  const titles = element("tr", undefined, { role: "row" });
  for (const [title, isNumber] of columns) titles.append(element("th", title, { scope: "col", role: "columnheader", ...(isNumber ? { class: "number" } : {}) }));
  head.append(titles);
  const body = element("tbody", undefined, { role: "rowgroup" });
  for (const row of rows) {
    const line = element("tr", undefined, { role: "row" });
    row.forEach((content, nth) => {
      const cell = element("td", undefined, { role: "cell", "data-label": columns[nth][0], ...(columns[nth][1] ? { class: "number" } : {}) });
      cell.append(content);
      line.append(cell);
    });
    body.append(line);
  }
  made.append(head, body);
  return made;
}

function bar(ratio, text) {
  const made = element("span", undefined, { class: "bar" });
  const fill = element("span");
  fill.style.width = `${Math.max(0, Math.min(1, ratio || 0)) * 100}%`;
  const track = element("span", undefined, { class: "track", "aria-hidden": "true" });
  track.append(fill);
  made.append(track, element("span", text));
  return made;
}

function fill(id, ...content) {
  document.getElementById(id).replaceChildren(...content);
}

export const note = (text) => element("p", text, { class: "note" });

function label(level, text) {
  const made = element("span", text, { class: `label ${level}` });
  return made;
}

// Text whose commands stand in backquotes.
function withCode(text) {
  return text.split("`").map((part, nth) => (nth % 2 ? element("code", part) : part));
}

// Changes the state line only if it says something new: screen readers read each change.
export function showState(level, sentences) {
  const state = document.getElementById("state");
  const said = `${level}\n${sentences.join("\n")}`;
  if (state.dataset.said === said) return;
  state.dataset.said = said;
  state.dataset.level = level;
  const [first, ...others] = sentences;
  const top = element("p");
  top.append(element("strong", LEVELS[level]), " ", ...withCode(first));
  const list = element("ul");
  for (const text of others) {
    const item = element("li");
    item.append(...withCode(text));
    list.append(item);
  }
  state.replaceChildren(top, ...(others.length ? [list] : []));
}

export function showFindings(now) {
  if (now.findings.length) {
    const level = now.findings[0].level;
    showState(level, now.findings.map((finding) => finding.text));
    return;
  }
  const tiers = now.tiers.length ? ` ${now.tiers.length === 1 ? "Its tier works." : `Its ${now.tiers.length} tiers work.`}` : "";
  const idle = now.counters.lookups ? "" : " No engine has looked anything up since the start.";
  showState("ok", [`The server serves, and has refused or lost nothing in the last 10 minutes.${tiers}${idle}`]);
}

export function showAbout(now) {
  const about = `${location.host} · version ${now.version} · up ${format.duration(now.uptime_seconds)}`;
  const place = document.getElementById("about");
  if (place.textContent !== about) place.textContent = about;
}

// now: of the server; minute: growth of counters over about the last minute (function of a key), and its length.
export function showTiles(now, minute, span) {
  const { pool } = now;
  const used = pool.arena_bytes - pool.free_bytes;
  const looked = minute.grown("lookup_tokens");
  const bounds = minute.under("lookup_seconds").sort((one, other) => Number(one.replace("+Inf", "Infinity")) - Number(other.replace("+Inf", "Infinity")));
  const counts = bounds.map((bound) => minute.grown("lookup_seconds", bound));
  const quantile = (share) => quantileOf(bounds.map((bound) => (bound === "+Inf" ? Infinity : Number(bound))), counts, share);
  const reported = now.owners.filter((owner) => owner.reported);
  const saved = reported.reduce((sum, { reported: { saved_seconds, lost_seconds } }) => sum + saved_seconds - lost_seconds, 0);
  const tokens = now.owners.reduce((sum, owner) => sum + (owner.lookup_tokens ?? 0), 0);
  const hits = now.owners.reduce((sum, owner) => sum + (owner.hit_tokens ?? 0), 0);
  const tiles = [
    ["hit-ratio", "Hit ratio of tokens", format.percent(looked ? minute.grown("hit_tokens") / looked : null), `${format.percent(tokens ? hits / tokens : null)} since the start`],
    ["arena", "Arena in use", format.percent(used / pool.arena_bytes), `${format.bytes(used)} of ${format.bytes(pool.arena_bytes)}`],
    ["lookups", "Lookups", format.perSecond(minute.rate("lookups")), `${format.whole(now.counters.lookups)} since the start`],
    ["latency", "Lookup time, p50", format.seconds(quantile(0.5)), `${format.seconds(quantile(0.99))} at p99`],
    ["loaded", "Loaded", format.bytesPerSecond(minute.rate("loaded_bytes")), `stored ${format.bytesPerSecond(minute.rate("stored_bytes"))}`],
    ["entries", "Blocks", format.count(pool.entries), `${format.count(pool.incomplete)} incomplete`],
    ["leases", "Leases", format.whole(pool.leases), `${format.whole(pool.tickets)} put tickets`],
    ["lag", "Longest loop lag", format.seconds(now.loop_lag_max_seconds), "in the last minute"],
  ];
  if (reported.length) tiles.push(["saved", "GPU time saved", format.duration(Math.max(0, saved)), `${format.duration(Math.max(0, span.total("saved_seconds") - span.total("lost_seconds")))} in this span`]);
  fill(
    "tiles",
    ...tiles.map(([id, title, value, more]) => {
      const tile = element("div", undefined, { id: `tile-${id}` });
      tile.append(element("dt", title), element("dd", value), element("dd", more, { class: "note" }));
      return tile;
    }),
  );
}

export function showOwners(now, span) {
  if (!now.owners.length) return fill("owners", note("No engine has opened a namespace yet."));
  const hasTenants = now.owners.some((owner) => owner.tenant);
  const hasReports = now.owners.some((owner) => owner.reported);
  const columns = [["Model", false], ...(hasTenants ? [["Tenant", false]] : []), ["Hit ratio, this span", true], ["Since the start", true], ["Tokens looked up", true], ["Loaded", true], ["Stored", true], ["In the arena", false], ...(hasReports ? [["GPU time saved", true]] : [])];
  const rows = now.owners.map((owner) => {
    const asked = span.total("owner", owner.model, owner.tenant, "lookup_tokens");
    const found = span.total("owner", owner.model, owner.tenant, "hit_tokens");
    const share = (owner.held_bytes ?? 0) / now.pool.arena_bytes;
    const saved = owner.reported ? owner.reported.saved_seconds - owner.reported.lost_seconds : null;
    return [
      owner.model || "–",
      ...(hasTenants ? [owner.tenant || "–"] : []),
      format.percent(asked ? found / asked : null),
      format.percent(owner.lookup_tokens ? owner.hit_tokens / owner.lookup_tokens : null),
      format.count(owner.lookup_tokens),
      format.bytes(owner.loaded_bytes),
      format.bytes(owner.stored_bytes),
      bar(share, `${format.bytes(owner.held_bytes ?? 0)}, ${format.percent(share)}`),
      ...(hasReports ? [saved === null ? "–" : `${saved < 0 ? "−" : ""}${format.duration(Math.abs(saved))}`] : []),
    ];
  });
  return fill("owners", table("Models and tenants: what they looked up, found and hold", columns, rows));
}

export function showCauses(now, span) {
  if (!now.owners.some((owner) => owner.reported)) {
    return fill("causes", note("No engine has reported yet. Engines count causes in vllm:kvpool_computed_tokens_total."));
  }
  const causes = span.under("computed_tokens").map((cause) => [cause, span.total("computed_tokens", cause)]);
  const shown = causes.filter(([, tokens]) => tokens > 0).sort((one, other) => other[1] - one[1]);
  const all = shown.reduce((sum, [, tokens]) => sum + tokens, 0);
  if (!shown.length) return fill("causes", note("No prompt token was computed in this span."));
  const rows = shown.map(([cause, tokens]) => {
    const name = element("span");
    name.append(element("code", cause), element("span", CAUSES[cause] ? ` ${CAUSES[cause]}` : "", { class: "note" }));
    return [name, format.count(tokens), bar(tokens / all, format.percent(tokens / all))];
  });
  return fill("causes", table("Prompt tokens that engines computed, by cause", [["Cause", false], ["Tokens", true], ["Share", false]], rows));
}

export function showTiers(now, span) {
  if (!now.tiers.length) return fill("tiers", note("The server has no tier: blocks live in memory only."));
  const columns = [["Tier", false], ["State", false], ["In use", false], ["Blocks", true], ["Promoted", true], ["Missed", true], ["Written", true], ["Not written", true]];
  const rows = now.tiers.map((tier) => {
    const counter = (name) => format.count(span.total("tier", tier.tier, name));
    const used = tier.size_bytes ? bar(tier.used_bytes / tier.size_bytes, `${format.bytes(tier.used_bytes)} of ${format.bytes(tier.size_bytes)}`) : format.bytes(tier.used_bytes);
    return [
      tier.tier,
      tier.up ? label("ok", "up") : label("fault", "down"),
      used,
      format.count(tier.entries),
      counter("promoted_blocks"),
      counter("missed_promotions"),
      counter("demoted_blocks"),
      counter("dropped_demotions"),
    ];
  });
  return fill("tiers", table("Tiers; promoted, missed and written are blocks in this span", columns, rows));
}

export function showEngines(now) {
  if (!now.engines.length) return fill("engines", note("No engine has reported within the last minute."));
  const columns = [["Engine", false], ["Pool", false], ["Transport", false], ["Model", false], ["kvpool", false], ["vLLM", false], ["Last report", true]];
  const rows = now.engines.map((engine) => [
    engine.engine,
    engine.breaker_open ? label("warning", "away: breaker open") : label("ok", "connected"),
    engine.transport || "–",
    engine.tenant ? `${engine.model} (${engine.tenant})` : engine.model,
    engine.version,
    engine.vllm_version,
    `${format.duration(engine.age_seconds)} ago`,
  ]);
  return fill("engines", table("Engines that have reported within the last minute", columns, rows));
}

export function showQuotas(now) {
  if (!now.quotas.length) return fill("quotas", note("No quota is set."));
  const rows = now.quotas.map((quota) => {
    const share = quota.used_bytes / quota.limit_bytes;
    return [quota.subject, bar(share, `${format.bytes(quota.used_bytes)} of ${format.bytes(quota.limit_bytes)}`)];
  });
  return fill("quotas", table("Quotas and their use", [["Subject", false], ["In use", false]], rows));
}

export function showCertificates(now) {
  const ends = Object.entries(now.certificates);
  if (!ends.length) return fill("certificates", note("The server has no certificate: it speaks plaintext."));
  const names = { server: "The server's own", client_ca: "Authority of clients" };
  const rows = ends.map(([name, at]) => [names[name] ?? name, format.day(at), at > now.time ? `in ${format.duration(at - now.time)}` : label("fault", "ended")]);
  return fill("certificates", table("When certificates end", [["Certificate", false], ["Ends", false], ["", false]], rows));
}

export function showLog(now) {
  if (!now.log.length) return fill("log", note("None since the start."));
  const rows = now.log.map((event) => {
    const text = element("span", event.text);
    const fields = Object.entries(event.fields).map(([name, value]) => `${name}=${value}`);
    if (event.count > 1) text.append(element("span", ` ×${event.count}`, { class: "note" }));
    if (fields.length) text.append(element("span", ` ${fields.join(" ")}`, { class: "note" }));
    return [format.moment(event.time), label(event.level === "error" ? "fault" : "warning", event.level), text];
  });
  return fill("log", table("Warnings and errors in the server's log, the newest first", [["Time", false], ["Level", false], ["Event", false]], rows));
}

export function showCounters(now) {
  const details = document.getElementById("counters");
  if (!details.open) return;
  const named = [...Object.entries(now.pool), ...Object.entries(now.counters)];
  for (const tier of now.tiers) for (const [name, value] of Object.entries(tier.counters)) named.push([`${tier.tier} ${name}`, value]);
  const rows = named.map(([name, value]) => [element("code", name), format.whole(value)]);
  details.lastElementChild.replaceChildren(table("All counters since the start", [["Name", false], ["Value", true]], rows));
}
