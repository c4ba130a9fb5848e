// The dashboard: asks for numbers, keeps the samples of each span, draws.

import { CHARTS, Chart } from "./charts.js";
import * as format from "./format.js";
import * as panels from "./panels.js";
import { nameOf, Series, SPAN_SECONDS } from "./series.js";
import { Source } from "./source.js";
import { ValueCurve } from "./value_curve.js";

const TITLES = { "15m": "Last 15 minutes", "1h": "Last hour", "6h": "Last 6 hours", "24h": "Last 24 hours", "7d": "Last 7 days" };
const MINUTE_S = 60;
const VALUE_EVERY_S = 12; // The curve is that of about the last hours.
const THEME = "kvpool-theme";

const stores = Object.fromEntries(Object.keys(SPAN_SECONDS).map((span) => [span, new Series(span)]));
const view = { span: "1h", now: null, awaySince: 0, valueAt: 0 };
const byId = (id) => document.getElementById(id);
const charts = CHARTS.map((spec) => new Chart(spec, byId("charts")));

const valueCurve = new ValueCurve(byId("value"));

const source = new Source({ onPoll: poll, onAway: showAway, onRefused: askForToken });

async function poll(get) {
  const now = await get("api/v1/now");
  const spans = view.span === "1h" ? ["1h"] : [view.span, "1h"]; // The tiles need the last minute.
  for (const span of spans) {
    const store = stores[span];
    const newest = store.newest(now.boot);
    if (newest && now.time - newest < store.intervalSeconds) continue;
    store.add(await get(`api/v1/history?span=${span}&since=${newest}`));
  }
  view.now = now;
  view.awaySince = 0;
  byId("token-form").hidden = true;
  byId("numbers").hidden = false;
  show();
  if (now.time - view.valueAt < VALUE_EVERY_S) return;
  valueCurve.update(await get("api/v1/value"));
  view.valueAt = now.time;
}

function show() {
  const { now, span } = view;
  const series = stores[span].withNow(now);
  panels.showFindings(now);
  panels.showAbout(now);
  panels.showTiles(now, lastMinute(now), series);
  const to = now.time;
  for (const chart of charts) chart.update(series, now, to - SPAN_SECONDS[span], to);
  panels.showOwners(now, series);
  panels.showCauses(now, series);
  panels.showTiers(now, series);
  panels.showEngines(now);
  panels.showQuotas(now);
  panels.showCertificates(now);
  panels.showLog(now);
  panels.showCounters(now);
}

// How counters have grown between the sample of a minute ago, or the first one of this boot, and now.
function lastMinute(now) {
  const store = stores["1h"];
  const values = new Map(now.sample.map(({ key, value }) => [nameOf(...key), value]));
  let row = store.times.findLastIndex((at) => at <= now.time - MINUTE_S);
  const firstOfBoot = store.gauge("arena_bytes").lastIndexOf(null) + 1;
  row = Math.max(row, firstOfBoot, 0);
  const length = now.time - (store.times[row] ?? now.time);
  const grown = (...key) => Math.max(0, (values.get(nameOf(...key)) ?? 0) - (store.values.get(nameOf(...key))?.[row] ?? 0));
  return {
    grown,
    rate: (...key) => (length >= 1 ? grown(...key) / length : null),
    under: (name) => [...values.keys()].map((text) => JSON.parse(text)).filter((key) => key.length === 2 && key[0] === name).map((key) => key[1]),
  };
}

function showAway(error) {
  view.awaySince ||= Date.now() / 1000;
  if (!(error instanceof TypeError) && error.name !== "TimeoutError" && error.name !== "AbortError") console.warn(error);
  const why = error.name === "TimeoutError" ? "it does not answer in time" : error instanceof TypeError ? "no connection" : error.message;
  panels.showState("away", [`The server is away since ${format.clock(view.awaySince)} (${why}). Engines compute meanwhile. This page asks again every few seconds.`]);
}

function askForToken(error) {
  const isCertificate = /client certificate/.test(error.message);
  byId("numbers").hidden = true;
  byId("token-form").hidden = false;
  for (const part of byId("token-form").querySelectorAll("label, .row, #token-note")) part.hidden = isCertificate;
  const hint = isCertificate ? " Import a client certificate of role metrics into this browser, and load the page again." : "";
  const wrong = source.token ? "The server refused the token" : "The server shows its numbers to callers with a token";
  byId("token-why").textContent = `${wrong}: ${error.message}.${hint}`.replace("..", ".");
  panels.showState("warning", [isCertificate ? "The server wants a client certificate." : source.token ? "The token was refused." : "The server wants a token."]);
  source.token = "";
  source.isRefused = true;
  if (!isCertificate) byId("token").focus();
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  source.token = byId("token").value.trim();
  byId("token").value = "";
  source.poll();
});

byId("spans").addEventListener("click", (event) => {
  const { span } = event.target.dataset;
  if (!span) return;
  view.span = span;
  for (const button of byId("spans").children) button.setAttribute("aria-pressed", String(button.dataset.span === span));
  byId("charts-title").textContent = TITLES[span];
  if (view.now) show();
  source.poll();
});

byId("counters").addEventListener("toggle", () => view.now && panels.showCounters(view.now));

const THEMES = ["system", "light", "dark"];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  for (const chart of charts) chart.restyle();
  valueCurve.restyle();
}

byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  localStorage.setItem(THEME, next);
  setTheme(next);
});

const kept = localStorage.getItem(THEME);
setTheme(THEMES.includes(kept) ? kept : "system");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => [...charts, valueCurve].forEach((chart) => chart.restyle()));
source.poll();
