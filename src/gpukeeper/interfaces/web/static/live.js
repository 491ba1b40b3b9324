// Live updates, countdowns and local times. The pages work without it.
"use strict";

const MINUTE = 60, HOUR = 3600, DAY = 86400;

// As durations.in_words: 9h, 1h30m, 2d4h, so that a row has one style.
function span(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < HOUR) return units(s, "m", "s", MINUTE);
  if (s < DAY) return units(Math.floor(s / MINUTE), "h", "m", 60);
  return units(Math.floor(s / HOUR), "d", "h", 24);
}

function units(count, large, small, size) {
  const whole = Math.floor(count / size), rest = count % size;
  if (!whole) return rest + small;
  return whole + large + (rest ? rest + small : "");
}

// The clock of the server counts: the page names its time when it was made; the browser only adds what passed since.
// In a demo time is compressed, and the page names how fast it passes.
const PACE = Number(document.body.dataset.pace || 1);
const MADE = document.body.dataset.now ? Date.parse(document.body.dataset.now) : Date.now();
const LOADED = Date.now();

function now() {
  return (MADE + (Date.now() - LOADED) * PACE) / 1000;
}

const hour = new Intl.DateTimeFormat(undefined, { weekday: "short", hour: "2-digit", minute: "2-digit" });
const local = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

function showTimes(root) {
  const present = now();
  for (const element of root.querySelectorAll("time[datetime]")) {
    const at = Date.parse(element.dateTime) / 1000;
    if (Number.isNaN(at)) continue;
    const mode = element.dataset.mode;
    let words = local.format(new Date((mode === "clock" ? present : at) * 1000));
    if (mode !== "clock") element.title = words;
    if (mode === "hour") words = hour.format(new Date(at * 1000));
    if (mode === "ago") words = at <= present ? span(present - at) + " ago" : "in " + span(at - present);
    if (mode === "for") words = "for " + span(present - at);
    if (mode === "in") words = at > present ? "in " + span(at - present) : "now";
    if (element.textContent !== words) element.textContent = words;
  }
}

function replaceTile(id, html) {
  const before = document.getElementById("t" + id);
  if (!before) return;
  const focused = before.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  const holder = document.createElement("template");
  holder.innerHTML = html;
  const after = holder.content.firstElementChild;
  showTimes(holder.content);
  before.replaceWith(after);
  if (focused) for (const link of after.querySelectorAll("a")) if (link.getAttribute("href") === focused) link.focus();
}

let reloading = false;

async function reloadRows() {
  if (reloading) return;
  reloading = true;
  try {
    const response = await fetch(document.body.dataset.rows, { credentials: "same-origin" });
    const rows = document.getElementById("rows");
    if (!response.ok || !rows) return location.reload();
    rows.innerHTML = await response.text();
    showTimes(rows);
  } catch (problem) {
    offline(true);
  } finally {
    reloading = false;
  }
}

function offline(isOffline) {
  document.getElementById("offline").hidden = !isOffline;
}

function listen(address) {
  const events = new EventSource(address);
  let lost = false;
  events.addEventListener("open", () => {
    offline(false);
    if (lost) reloadRows();
    lost = false;
  });
  events.addEventListener("error", () => {
    lost = true;
    offline(true);
  });
  events.addEventListener("list", reloadRows);
  events.addEventListener("tiles", (event) => {
    const change = JSON.parse(event.data);
    const rows = document.getElementById("rows");
    if (change.rows && rows) rows.innerHTML = change.rows;
    for (const [id, html] of Object.entries(change.tiles)) replaceTile(id, html);
    for (const element of document.querySelectorAll("[data-count]")) {
      element.textContent = change.counts[element.dataset.count] || 0;
    }
  });
}

showTimes(document);
setInterval(() => showTimes(document), 1000);
if (document.body.dataset.live) listen(document.body.dataset.live);
for (const select of document.querySelectorAll(".filters select")) {
  select.addEventListener("change", () => select.form.requestSubmit());
}
