// The page: asks for numbers, keeps samples, draws.

import { HourCharts, ValueCurve } from "./charts.js";
import * as format from "./format.js";
import * as panels from "./panels.js";
import { Samples } from "./samples.js";
import { Source, storage } from "./source.js";

const MINUTE_S = 60;
const VALUE_EVERY_S = 12; // The curve is that of about the last hours.
const THEME = "kvpool-theme";
const THEMES = ["system", "light", "dark"];
const UNREACHED = { TimeoutError: "it does not answer in time", TypeError: "no connection" };

const byId = (id) => document.getElementById(id);
const local = storage("localStorage");
const samples = new Samples();
const charts = new HourCharts(byId("charts-title"), byId("charts"));
const valueCurve = new ValueCurve(byId("value"));
const source = new Source({ onPoll: poll, onAway: showAway, onRefused: askForToken });
let now = null;
let awaySince = 0;
let valueAt = 0;

async function poll(get) {
  const asked = await get("api/v1/now");
  if (samples.misses(asked.sample)) samples.add((await get("api/v1/history")).samples);
  samples.add([asked.sample]);
  now = asked;
  awaySince = 0;
  byId("token-form").hidden = true;
  byId("numbers").hidden = false;
  const { boot, time } = now.sample;
  const ofBoot = samples.kept.filter((sample) => sample.boot === boot);
  const before = ofBoot.findLast((sample) => sample.time <= time - MINUTE_S) ?? ofBoot[0] ?? now.sample;
  panels.show(now, before.time < time ? [before, now.sample] : [now.sample]);
  charts.update(samples.kept, samples.restarts(), now);
  if (Math.abs(time - valueAt) < VALUE_EVERY_S) return; // The clock of another start may be behind.
  valueCurve.update(await get("api/v1/value"));
  valueAt = time;
}

function showAway(error) {
  awaySince ||= Date.now() / 1000;
  const why = UNREACHED[error.name];
  if (!why) console.warn(error);
  panels.showState("away", [`The server is away since ${format.clock(awaySince)} (${why ?? error.message}). Engines compute meanwhile. This page asks again every few seconds.`]);
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
  if (!isCertificate) byId("token").focus();
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  source.token = byId("token").value.trim();
  byId("token").value = "";
  source.poll();
});

byId("counters").addEventListener("toggle", () => now && panels.showCounters(now.stats));

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  restyle();
}

function restyle() {
  for (const chart of [...charts.charts, valueCurve.chart]) chart.restyle();
}

byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  local[THEME] = next;
  setTheme(next);
});

setTheme(THEMES.includes(local[THEME]) ? local[THEME] : "system");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
source.poll();
