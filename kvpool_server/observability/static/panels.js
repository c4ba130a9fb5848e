// Everything beside the charts: tiles, tables, the state line. Text from the server becomes text nodes only.

import * as format from "./format.js";
import { lookupQuantile, rate, ratio } from "./samples.js";

const LEVELS = { ok: "OK", warning: "Warning", fault: "Fault", away: "Away" };
const CERTIFICATES = { server: "The server's own", client_ca: "Authority of clients" };

export function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// Gives an element these children, unless it has equal ones: to replace children ends selections, closes an open select,
// and takes screen readers out of them.
export function fill(at, ...children) {
  const made = at.cloneNode();
  made.append(...children);
  if (!at.isEqualNode(made)) at.replaceChildren(...made.childNodes);
}

export const note = (text) => element("p", text, { class: "note" });

// columns: [title, isNumber]; rows: of texts or elements. On a phone each row of "cards" is a card, so cells name their
// column; roles keep it a table for screen readers.
export function table(caption, columns, rows, name = "cards") {
  const made = element("table", undefined, { role: "table", class: name });
  const line = (parent, cell, row) => {
    const tr = element("tr", undefined, { role: "row" });
    row.forEach((content, nth) => {
      const td = element(cell, undefined, { role: cell === "th" ? "columnheader" : "cell", class: columns[nth][1] ? "number" : "" });
      if (cell === "td") td.dataset.label = columns[nth][0];
      td.append(content);
      tr.append(td);
    });
    parent.append(tr);
  };
  const [head, body] = ["thead", "tbody"].map((part) => element(part, undefined, { role: "rowgroup" }));
  line(head, "th", columns.map(([title]) => title));
  for (const row of rows) line(body, "td", row);
  made.append(element("caption", caption, { class: "hidden" }), head, body);
  return made;
}

// A table of items, or what is said without any. columns: [title, cell of an item, isNumber].
function list(id, caption, items, empty, columns) {
  const rows = items.map((item) => columns.map(([, cell]) => cell(item)));
  fill(document.getElementById(id), items.length ? table(caption, columns.map(([title, , isNumber]) => [title, isNumber]), rows) : note(empty));
}

const label = (level, text) => element("span", text, { class: `label ${level}` });

function bar(share, text) {
  const [made, track, filled] = [element("span", undefined, { class: "bar" }), element("span", undefined, { class: "track", "aria-hidden": "true" }), element("span")];
  filled.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  track.append(filled);
  made.append(track, element("span", text));
  return made;
}

const share = (used, size) => bar(used / size, `${format.bytes(used)} of ${format.bytes(size)}`);

// Screen readers read each change of the state line.
export function showState(level, [first, ...others]) {
  const state = document.getElementById("state");
  state.dataset.level = level;
  const [top, rest] = [element("p"), element("ul")];
  top.append(element("strong", LEVELS[level]), " ", ...format.withCode(first));
  for (const text of others) {
    const item = element("li");
    item.append(...format.withCode(text));
    rest.append(item);
  }
  fill(state, top, ...(others.length ? [rest] : []));
}

function showFindings({ findings, stats }) {
  if (findings.length) return showState(findings[0].level, findings.map(({ text }) => text));
  const count = stats.tiers.length;
  const tiers = count ? ` ${count === 1 ? "Its tier works." : `Its ${count} tiers work.`}` : "";
  const idle = stats.counters.lookups ? "" : " No engine has looked anything up since the start.";
  return showState("ok", [`The server serves, and nothing is known to be wrong.${tiers}${idle}`]);
}

const sum = (items, name) => items.reduce((all, item) => all + item[name], 0);
const hasReported = (used) => used.saved_seconds > 0 || used.lost_seconds > 0 || Object.keys(used.computed_tokens).length > 0;

// minute: the samples of a minute ago, or of the first one of this start, and of now.
function showTiles({ stats }, minute) {
  const { usage, rpc_seconds_bounds: bounds } = stats.server;
  const used = stats.arena_bytes - stats.free_bytes;
  const perSecond = (name) => rate(minute, (sample) => sample[name]).at(-1);
  const [tokens, hits] = [sum(usage, "lookup_tokens"), sum(usage, "hit_tokens")];
  const reported = usage.some(hasReported);
  const tiles = [
    ["saved", "Time saved", reported ? format.seconds(sum(usage, "saved_seconds")) : format.NONE, reported ? `${format.seconds(sum(usage, "lost_seconds"))} lost, since the start` : "no engine has reported"],
    ["hit-ratio", "Hit ratio of tokens", format.percent(ratio(minute, "hit_tokens", "lookup_tokens").at(-1)), `${format.percent(tokens ? hits / tokens : null)} since the start`],
    ["arena", "Arena in use", format.percent(used / stats.arena_bytes), `${format.bytes(used)} of ${format.bytes(stats.arena_bytes)}`],
    ["lookups", "Lookups", format.perSecond(perSecond("lookups")), `${format.whole(stats.counters.lookups)} since the start`],
    ["latency", "Lookup time, p50", format.seconds(lookupQuantile(minute, bounds, 0.5).at(-1)), `${format.seconds(lookupQuantile(minute, bounds, 0.99).at(-1))} at p99`],
    ["loaded", "Loaded", format.bytesPerSecond(perSecond("loaded_bytes")), `stored ${format.bytesPerSecond(perSecond("stored_bytes"))}`],
    ["entries", "Blocks", format.count(stats.num_entries), `${format.count(stats.num_incomplete)} incomplete`],
    ["leases", "Leases", format.whole(stats.num_leases), `${format.whole(stats.num_tickets)} put tickets`],
    ["lag", "Longest loop lag", format.seconds(stats.server.loop_lag_max_seconds), "in the last minute"],
  ];
  fill(
    document.getElementById("tiles"),
    ...tiles.map(([id, title, value, more]) => {
      const tile = element("div", undefined, { id: `tile-${id}` });
      tile.append(element("dt", title), element("dd", value), element("dd", more, { class: "note" }));
      return tile;
    }),
  );
}

function showUsage({ arena_bytes: arena, server: { usage } }, glosses) {
  const ofReports = (title, name) => [title, (used) => (hasReported(used) ? format.seconds(used[name]) : format.NONE), true];
  list("owners", "Models and tenants: what they saved, looked up, found and hold, since the start", usage, "No engine has looked up or stored anything yet.", [
    ["Model", ({ model }) => model || format.NONE],
    ...(usage.some(({ tenant }) => tenant) ? [["Tenant", ({ tenant }) => tenant || format.NONE]] : []),
    ...(usage.some(hasReported) ? [ofReports("Time saved", "saved_seconds"), ofReports("Time lost", "lost_seconds")] : []),
    ["Hit ratio", (used) => format.percent(used.lookup_tokens ? used.hit_tokens / used.lookup_tokens : null), true],
    ["Tokens looked up", (used) => format.count(used.lookup_tokens), true],
    ["Loaded", (used) => format.bytes(used.loaded_bytes), true],
    ["Stored", (used) => format.bytes(used.stored_bytes), true],
    ["In the arena", (used) => bar(used.held_bytes / arena, `${format.bytes(used.held_bytes)}, ${format.percent(used.held_bytes / arena)}`)],
  ]);
  const causes = {};
  for (const { computed_tokens: computed } of usage) for (const [cause, tokens] of Object.entries(computed)) causes[cause] = (causes[cause] ?? 0) + tokens;
  const all = Object.values(causes).reduce((total, tokens) => total + tokens, 0);
  const shown = Object.entries(causes).filter(([, tokens]) => tokens).sort(([, one], [, other]) => other - one);
  list("causes", "Prompt tokens that engines computed since the start, by cause", shown, "No engine has reported yet. Engines count causes in vllm:kvpool_computed_tokens_total.", [
    ["Cause", ([cause]) => {
      const [name, gloss] = [element("span"), element("span", " ", { class: "note" })];
      gloss.append(...format.withCode(glosses[cause] ?? ""));
      name.append(element("code", cause), gloss);
      return name;
    }],
    ["Tokens", ([, tokens]) => format.count(tokens), true],
    ["Share", ([, tokens]) => bar(tokens / all, format.percent(tokens / all))],
  ]);
}

function showLog(log) {
  list("log", "Warnings and errors in the server's log, the newest first", log, "None since the start.", [
    ["Time", ({ time }) => format.moment(time)],
    ["Level", ({ level }) => label(level === "error" ? "fault" : "warning", level)],
    ["Event", ({ text, fields, count }) => {
      const shown = element("span", text);
      const more = [...(count > 1 ? [`×${count}`] : []), ...Object.entries(fields).map(([name, value]) => `${name}=${value}`)];
      if (more.length) shown.append(element("span", ` ${more.join(" ")}`, { class: "note" }));
      return shown;
    }],
  ]);
}

export function showCounters(stats) {
  const details = document.getElementById("counters");
  if (!details.open) return;
  const gauges = Object.entries(stats).filter(([, value]) => typeof value === "number");
  const ofTiers = stats.tiers.flatMap(({ name, counters }) => Object.entries(counters).map(([counter, value]) => [`${name} ${counter}`, value]));
  const ofRpcs = stats.server.rpcs.map(({ method, status, buckets }) => [`${method} ${status}`, buckets.reduce((all, count) => all + count, 0)]);
  const rows = [...gauges, ...Object.entries(stats.counters).sort(), ...ofTiers.sort(), ...ofRpcs].map(([name, value]) => [element("code", name), format.whole(value)]);
  fill(details.lastElementChild, table("All counters since the start", [["Name"], ["Value", true]], rows));
}

export function show(now, minute) {
  const { stats } = now;
  const { server } = stats;
  showFindings(now);
  document.getElementById("about").textContent = `${location.host} · version ${server.version} · up ${format.duration(server.uptime_seconds)}, since ${format.clock(server.unix_seconds - server.uptime_seconds)}`;
  showTiles(now, minute);
  showUsage(stats, now.causes);
  list("tiers", "Tiers; promoted, missed and written are blocks since the start", stats.tiers, "The server has no tier: blocks live in memory only.", [
    ["Tier", ({ name }) => name],
    ["State", ({ up, servers }) => {
      const away = servers.filter((server) => !server.up).map(({ name }) => name);
      if (up && away.length) return label("warning", `no answer: ${away.join(", ")}`);
      return up ? label("ok", "up") : label("fault", "down");
    }],
    ["In use", (tier) => (tier.size_bytes ? share(tier.used_bytes, tier.size_bytes) : format.bytes(tier.used_bytes))],
    ["Blocks", (tier) => format.count(tier.num_entries), true],
    ...Object.entries({ Promoted: "promoted_blocks", Missed: "missed_promotions", Written: "demoted_blocks", "Not written": "dropped_demotions" }).map(([title, name]) => [title, ({ counters }) => format.count(counters[name] ?? 0), true]),
  ]);
  list("engines", "Engines that have reported within the last minute", stats.engines, "No engine has reported within the last minute.", [
    ["Engine", ({ engine }) => engine],
    ["Pool", (engine) => (engine.breaker_open ? label("warning", "away: breaker open") : label("ok", "connected"))],
    ["Transport", ({ transport }) => transport || format.NONE],
    ["Model", ({ model, tenant }) => (tenant ? `${model} (${tenant})` : model)],
    ["kvpool", ({ version }) => version],
    ["vLLM", (engine) => engine.vllm_version],
    ["Last report", (engine) => `${format.duration(engine.age_seconds)} ago`, true],
  ]);
  list("quotas", "Quotas and their use", stats.quotas, "No quota is set.", [
    ["Subject", ({ subject }) => subject],
    ["In use", (quota) => share(quota.used_bytes, quota.limit_bytes)],
  ]);
  list("certificates", "When certificates end", Object.entries(server.certificate_ends), "The server has no certificate: it speaks plaintext.", [
    ["Certificate", ([name]) => CERTIFICATES[name] ?? name],
    ["Ends", ([, at]) => format.day(at)],
    ["", ([, at]) => (at > server.unix_seconds ? `in ${format.duration(at - server.unix_seconds)}` : label("fault", "ended"))],
  ]);
  showLog(now.log);
  showCounters(stats);
}
