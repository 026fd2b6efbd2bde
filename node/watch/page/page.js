"use strict";
// Shows what the server sends: one JSON picture of the swarm at a time. Names are strangers', so they only ever become text.
/* global Chart, clock, style, drawMap, mapKey, meetingsInWords */

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
let chosen = null; // the id of the peer that is picked out
let last = null;

function make(kind, attributes = {}, text = null, space = null) {
  const made = space ? document.createElementNS(space, kind) : document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}
const draw = (kind, attributes, text = null) => make(kind, attributes, text, SVG);

function dark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

// Hues a golden angle apart, so that neighbours differ most; by the order in which the peers came, so that each keeps its own.
const colour = (index) => `hsl(${((210 + index * 137.5) % 360).toFixed(1)} 70% ${dark() ? 65 : 38}%)`;
const number = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits));

// Without waiting for others; a node that counts none sends none.
const tokens = (value, mfu) => (value ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : "–") + (mfu == null ? "" : ` (${(100 * mfu).toFixed(0)} % MFU)`);

// How many steps training goes on during an exchange; 0 waits for each.
const lag = ({ exchanges: e }) => (e.lag_steps ? `${e.lag_steps}${e.lag_auto ? " auto" : ""}${e.late ? `, ${e.late} late` : ""}` : "–");

// How others reach it, and what its exchanges move each way.
const reach = ({ link }) => link.reach + (link.bytes_per_s ? `, ${bytes(link.bytes_per_s)}/s` : "");

// What others signed of its work, and how many they are.
function work(p) {
  const c = p.confirmed, said = [];
  if (c.exchanges) said.push(`${c.exchanges} ex., ${tokens(c.tokens)} tok.`);
  if (c.rollouts) said.push(`${c.rollouts} rollouts`);
  if (c.votes) said.push(`${c.votes} votes`);
  return c.partners ? `${said.join(", ")} by ${c.partners} (${plural(c.ranges, "range")})` : "–";
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (value < 1000 || unit === "TB") return `${Number(value.toPrecision(3))} ${unit}`;
    value /= 1000;
  }
}

const distance = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(2)).toString());

function tiles(picture) {
  const t = picture.totals, apart = picture.charts.consensus.each[0];
  const rounds = t.round_min === null ? "–" : t.round_min === t.round_max ? `${t.round_min}` : `${t.round_min} to ${t.round_max}`;
  const shown = [
    ["Peers", t.sampled ? `about ${t.size.toLocaleString("en")} (estimated from ${t.peers})` : `${t.peers} of ${t.known}`], ["Round", rounds], ["Loss", number(t.loss)], ["Consensus distance", distance(apart[apart.length - 1])],
    ["Steps/s", number(t.steps_per_s, 1)], ["Tokens/s", tokens(t.tokens_per_s)], ["Sent/s", bytes(t.bytes_sent_per_s)], [t.sampled ? "Sent in all, by those" : "Sent in all", bytes(t.bytes_sent)],
  ];
  if (t.reward !== null) shown.push(["Reward", number(t.reward)]);
  if (t.groups_own !== null) shown.push(["Groups learnt, own + others'", `${t.groups_own} + ${t.groups_foreign}`]);
  if (t.groups_seen) { // what peers state need not fit together
    const causes = Object.entries(t.groups_unused), all = causes.reduce((sum, [, count]) => sum + count, 0);
    const share = (count) => `${Math.min(Math.round((100 * count) / t.groups_seen), 100)} %`;
    shown.push(["Groups of no use", share(all), causes.slice(0, 3).map(([cause, count]) => `${cause} ${share(count)}`).join(", ")]);
  }
  if (t.confirmed) {
    const c = t.confirmed, apart = c.rounds ? `, ${Math.round((100 * c.elsewhere) / c.rounds)} % across address ranges` : "";
    shown.push(["Confirmed by partners", plural(c.exchanges, "exchange"), `${tokens(c.tokens)} tokens${apart}`]);
  }
  if (t.claims !== null) shown.push(["Claims, checks, invalid", `${t.claims}, ${t.checked}, ${t.invalid}`]);
  if (t.refused) shown.push(["Messages refused", `${t.refused} of ${t.heard + t.refused}`]);
  byId("tiles").replaceChildren(...shown.map(([name, value, more]) => {
    const tile = make("div");
    tile.append(make("dt", {}, name), make("dd", {}, value));
    if (more) {
      tile.className = "double";
      tile.append(make("dd", { class: "more" }, more));
    }
    return tile;
  }));
}

const made = {
  loss: new Chart(byId("loss"), { name: "loss over rounds", x: "round", y: "loss, nats", band: true }),
  loss_over_time: new Chart(byId("loss_over_time"), { name: "loss over wall time", x: "time since the first status", y: "loss, nats", time: true, band: true }),
  consensus: new Chart(byId("consensus"), { name: "consensus distance", x: "round", y: "share of the weights' norm", value: distance, from_zero: true }),
  throughput: new Chart(byId("throughput"), { name: "throughput of all peers", x: "time since the first status", y: "tokens a second", time: true, from_zero: true }),
  traffic: new Chart(byId("traffic"), { name: "traffic of all peers", x: "time since the first status", y: "bytes a second", time: true, value: bytes, from_zero: true }),
  reward: new Chart(byId("reward"), { name: "reward over rounds", x: "round", y: "reward", band: true }),
};

// A thin line for each peer, under the band and the thick mean.
function ofPeers(name, picture) {
  const data = picture.charts[name], faint = dark();
  if (!data) return;
  const lines = data.each.map((each, index) => {
    const peer = picture.peers[index];
    return { label: peer.name, data: each, colour: colour(peer.number), width: peer.id === chosen ? 2.5 : 1, faded: chosen !== null && peer.id !== chosen, told: peer.id === chosen };
  });
  if (picture.totals.known > 1) lines.push({ label: "mean", data: data.mean, colour: style("--text"), width: 3, told: true });
  else if (lines.length) lines[0].told = true;
  made[name].show(data, lines, faint);
}

function charts(picture) {
  const faint = dark(), all = picture.charts;
  for (const name of ["loss", "loss_over_time", "reward"]) ofPeers(name, picture);
  const one = (label, data, colours = "--accent") => ({ label, data, colour: style(colours), width: 2, told: true });
  const [smooth, raw] = all.consensus.each;
  made.consensus.show(all.consensus, [{ label: "raw", data: raw, colour: style("--accent"), width: 1, faded: true }, one("distance", smooth)], faint);
  const tokensKnown = all.tokens_per_s.mean.some((value) => value);
  const speed = tokensKnown ? all.tokens_per_s : all.steps_per_s;
  made.throughput.options.y = tokensKnown ? "tokens a second" : "steps a second";
  made.throughput.show(speed, [one(tokensKnown ? "tokens" : "inner steps", speed.mean)], faint);
  const [sent, received] = all.traffic.each;
  made.traffic.show(all.traffic, [one("received", received, "--second"), one("sent", sent)], faint);
}

const COLUMNS = [
  ["Peer", null], ["Role", (p) => p.roles.join(", ")], ["State", (p) => p.doing], ["Round", (p) => `${p.round}`], ["Step", (p) => `${p.progress.step}`],
  ["Loss", (p) => number(p.loss.training)], ["With", (p) => p.partners.slice(0, 3).join(", ") || p.exchanges.why || "–"], ["Steps/s", (p) => number(p.progress.steps_per_s, 1)],
  ["Tokens/s", (p) => tokens(p.progress.tokens_per_s, p.progress.mfu)],
  ["Lag", lag], ["Reach", reach], ["Up", (p) => `${bytes(p.bytes_sent_per_s)}/s`], ["Down", (p) => `${bytes(p.bytes_received_per_s)}/s`], ["Reward", (p) => number(p.rollouts?.reward)],
  ["Confirmed", work], ["Faults", (p) => p.faults_text || "–"], ["Heard", (p) => `${p.heard_s_ago.toFixed(0)} s ago`],
];

const LONG = 24; // characters from which on a cell has several lines
const cell = (text) => make("td", text.length > LONG ? { class: "words" } : {}, text);

function table(picture) {
  const shown = COLUMNS.filter(([name]) => name !== "Reward" || picture.totals.reward !== null);
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.peer : null;
  byId("columns").replaceChildren(...shown.map(([name]) => make("th", { scope: "col" }, name)));
  byId("peers").replaceChildren(...picture.peers.map((peer) => {
    const row = make("tr", { class: peer.here ? "" : "gone" });
    const first = make("th", { scope: "row" }), mark = make("span", { class: "mark", "aria-hidden": "true" });
    mark.style.background = colour(peer.number);
    const button = make("button", { type: "button", "aria-pressed": String(chosen === peer.id), title: peer.id, "data-peer": peer.id });
    button.append(mark, peer.name);
    button.addEventListener("click", () => { chosen = chosen === peer.id ? null : peer.id; show(last); });
    first.append(button);
    row.append(first, ...shown.slice(1).map(([, text]) => cell(text(peer))));
    return row;
  }));
  if (focused) [...document.querySelectorAll("[data-peer]")].find((found) => found.dataset.peer === focused)?.focus();
}

function news(list, items, none) {
  list.replaceChildren(...items.slice(-100).reverse().map(([time, kind, text]) => {
    const line = make("li", { class: kind });
    line.append(make("time", {}, new Date(time * 1000).toLocaleTimeString()), text);
    return line;
  }));
  if (!items.length) list.append(make("li", { class: "none" }, none));
}

// Dark on light in both themes, with the margin of four modules that cameras expect.
function invite(shown) {
  byId("link-section").hidden = !shown;
  if (!shown || byId("link").textContent === shown.text) return;
  byId("link").textContent = shown.text;
  const size = shown.qr.size + 8;
  byId("qr").setAttribute("viewBox", `-4 -4 ${size} ${size}`);
  byId("qr").replaceChildren(
    draw("rect", { x: -4, y: -4, width: size, height: size, fill: "#fff" }), draw("path", { d: shown.qr.path, fill: "#000" }));
}

async function copy() {
  try {
    await navigator.clipboard.writeText(byId("link").textContent);
    byId("copied").textContent = "copied";
  } catch { // the browser does not allow it: the user copies what is selected
    getSelection().selectAllChildren(byId("link"));
    byId("copied").textContent = "selected: press Ctrl+C";
  }
}

function show(picture) {
  if (!picture) return;
  last = picture;
  const title = picture.title ? `${picture.title.name} · ${picture.title.task} · ${picture.title.method}` : "shoal watch";
  byId("title").textContent = title;
  const about = picture.totals;
  document.title = `${about.sampled ? `about ${about.size.toLocaleString("en")}` : about.peers} peers · ${title}`;
  const silent = picture.totals.connected === 0 && !picture.ended && !picture.span;
  byId("state").textContent = picture.ended ? "end of the recording" : picture.span ? "recording" : silent ? "no connection to any peer" : `live, ${plural(picture.totals.connected, "connection")}`;
  replayBar(picture);
  tiles(picture);
  byId("reward-section").hidden = !picture.charts.reward;
  charts(picture);
  drawMap(byId("map"), picture, chosen);
  byId("key").textContent = mapKey(picture);
  byId("meetings").replaceChildren(...meetingsInWords(picture).map((text) => make("li", {}, text)));
  table(picture);
  byId("changes").textContent = picture.changes.length ? `Changed by the creator: ${picture.changes.join(", ")}` : "";
  const faulty = (item) => item[1] === "fault" || item[1] === "verdict";
  news(byId("faults"), picture.news.filter(faulty), "None so far.");
  news(byId("news"), picture.news.filter((item) => !faulty(item)), "Nobody so far.");
  invite(picture.link);
}

// -- the time slider of a recording ----------------------------------------------------------------------------------------

const TICK_S = 0.5;
const player = { time: null, wanted: null, busy: false, timer: null }; // time: null while the page follows the server's replay

function replayBar(picture) {
  byId("replay").hidden = !picture.span;
  if (!picture.span) return;
  const [begin, end] = picture.span, at = Math.min(player.time ?? picture.now, end), slider = byId("time");
  slider.max = String(Math.max(Math.round((end - begin) * 10), 1));
  if (document.activeElement !== slider || player.timer !== null || player.time === null) slider.value = String(Math.round((at - begin) * 10));
  byId("clock").textContent = `${clock(at - begin)} of ${clock(end - begin)}`;
  slider.setAttribute("aria-valuetext", byId("clock").textContent);
}

async function look(time) {
  player.time = player.wanted = time;
  if (player.busy) return; // the newest wish is fetched when the one before has come
  player.busy = true;
  try {
    while (player.wanted !== null) {
      const asked = player.wanted;
      player.wanted = null;
      const answer = await fetch(`at?time=${asked}`);
      if (answer.ok) show(await answer.json());
    }
  } catch {
    byId("state").textContent = "shoal watch has ended, or cannot be reached";
    pause();
  } finally {
    player.busy = false;
  }
}

function pause() {
  clearInterval(player.timer);
  player.timer = null;
  byId("play").textContent = "Play";
}

function play() {
  const [begin, end] = last.span;
  let time = player.time ?? last.now;
  if (time >= end) time = begin;
  byId("play").textContent = "Pause";
  player.timer = setInterval(() => {
    time = Math.min((player.moved ?? time) + TICK_S * Number(byId("speed").value), end);
    player.moved = null;
    if (!player.busy) look(time);
    if (time >= end) pause();
  }, TICK_S * 1000);
  look(time);
}

byId("play").addEventListener("click", () => (player.timer === null ? play() : pause()));
byId("replay").addEventListener("submit", (event) => event.preventDefault());
byId("time").addEventListener("input", () => {
  const time = last.span[0] + Number(byId("time").value) / 10;
  player.moved = time;
  look(time);
});

// -- beginning -------------------------------------------------------------------------------------------------------------

byId("copy").addEventListener("click", copy);
byId("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  show(last);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(last));
addEventListener("resize", () => show(last));
show(JSON.parse(byId("first").textContent)); // so that it shows something before the stream is there
const source = new EventSource("events");
source.addEventListener("message", (event) => { if (player.time === null) show(JSON.parse(event.data)); });
source.addEventListener("error", () => { if (player.time === null) byId("state").textContent = "shoal watch has ended, or cannot be reached"; });
