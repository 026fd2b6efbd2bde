"use strict";
// Shows what the server sends: one JSON picture of the swarm at a time. Names are strangers', so they only ever become text.

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

// Hues a golden angle apart, so that neighbours in the table differ most.
const colour = (index) => `hsl(${(210 + index * 137.5) % 360} 70% ${dark() ? 65 : 40}%)`;
const number = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits));

// Without waiting for others; a node that counts none sends none.
const tokens = (value, mfu) => (value ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : "–") + (mfu == null ? "" : ` (${(100 * mfu).toFixed(0)} % MFU)`);

// How many steps training goes on during an exchange; 0 waits for each.
const lag = (p) => (p.lag ? `${p.lag}${p.lag_auto ? " auto" : ""}${p.late ? `, ${p.late} late` : ""}` : "–");

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function bytes(value) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000 || unit === "GB") return `${value.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    value /= 1000;
  }
}

function tiles(picture) {
  const t = picture.totals;
  const rounds = t.round_min === null ? "–" : t.round_min === t.round_max ? `${t.round_min}` : `${t.round_min}–${t.round_max}`;
  const shown = [
    ["Peers", `${t.peers} of ${t.known}`], ["Round", rounds], ["Loss", number(t.loss)], ["Steps/s", number(t.steps_per_s, 1)],
    ["Tokens/s", tokens(t.tokens_per_s)],
    ["Sent/s", bytes(t.sent_per_s)], ["Sent in all", bytes(t.sent)],
  ];
  if (t.reward !== null) shown.push(["Reward", number(t.reward)]);
  if (t.rollouts_own !== null) shown.push(["Groups learnt, own + others'", `${t.rollouts_own} + ${t.rollouts_foreign}`]);
  if (t.claims !== null) shown.push(["Claims, checks, invalid", `${t.claims}, ${t.checked}, ${t.invalid}`]);
  shown.push(["Messages", `${t.heard}, ${t.refused} refused`]);
  byId("tiles").replaceChildren(...shown.map(([name, value]) => {
    const tile = make("div");
    tile.append(make("dt", {}, name), make("dd", {}, value));
    return tile;
  }));
}

// Drawn in the pixels that it has, so that its text is readable at any width.
function sized(svg) {
  const width = Math.max(svg.parentElement.clientWidth - 24, 240), height = Math.round(Math.min(280, width * 0.62));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return [width, height];
}

function chart(svg, peers, key, mean, name) {
  const [width, height] = sized(svg);
  const [left, right, top, bottom] = [56, 12, 10, 24];
  const points = peers.flatMap((peer) => peer[key]);
  const parts = [draw("rect", { class: "frame", x: left, y: top, width: width - left - right, height: height - top - bottom })];
  if (points.length) {
    const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
    const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const x = (v) => left + ((v - x0) / (x1 - x0 || 1)) * (width - left - right);
    const y = (v) => top + ((y1 - v) / (y1 - y0 || 1)) * (height - top - bottom);
    for (const share of [0, 0.5, 1]) {
      const value = y0 + (y1 - y0) * share;
      parts.push(draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, Number(value.toPrecision(3)).toString()));
    }
    parts.push(draw("text", { x: left, y: height - 6 }, `${x0}`), draw("text", { x: width - right, y: height - 6, "text-anchor": "end" }, `${x1}`));
    parts.push(draw("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, "round"));
    parts.push(draw("text", { x: width - right - 6, y: top + 16, "text-anchor": "end" }, name));
    const route = (points) => points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    peers.forEach((peer, index) => {
      const path = route(peer[key]);
      const faded = chosen && chosen !== peer.id ? " faded" : "";
      const line = draw("path", { class: `curve${faded}`, d: path, stroke: colour(index) });
      line.append(draw("title", {}, peer.name));
      parts.push(line);
    });
    if (peers.length > 1) {
      const line = draw("path", { class: "mean", d: route(mean) });
      line.append(draw("title", {}, "mean of all peers"));
      parts.push(line);
    }
  } else {
    parts.push(draw("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing yet"));
  }
  svg.replaceChildren(...parts);
}

function graph(svg, picture) {
  const peers = picture.peers.slice(0, 48), parts = [], place = new Map();
  const [width, height] = sized(svg);
  const [across, down] = [Math.min(width / 2 - 80, 220), height / 2 - 34];
  peers.forEach((peer, index) => {
    const angle = (2 * Math.PI * index) / peers.length - Math.PI / 2;
    place.set(peer.tail, { x: width / 2 + across * Math.cos(angle), y: height / 2 + down * Math.sin(angle), index, peer, side: Math.cos(angle) });
  });
  const most = Math.max(1, ...picture.pairs.map((pair) => pair[2]));
  for (const [a, b, count] of picture.pairs) {
    const from = place.get(a), to = place.get(b);
    if (!from || !to) continue;
    const mine = !chosen || chosen === from.peer.id || chosen === to.peer.id;
    const line = draw("line", {
      class: mine ? "" : "faded", x1: from.x, y1: from.y, x2: to.x, y2: to.y, stroke: "var(--accent)",
      "stroke-width": (0.5 + (4 * count) / most).toFixed(2), "stroke-opacity": (0.25 + (0.6 * count) / most).toFixed(2),
    });
    line.append(draw("title", {}, `${from.peer.name} and ${to.peer.name}: ${count} times`));
    parts.push(line);
  }
  for (const { x, y, index, peer, side } of place.values()) {
    const spot = draw("circle", { cx: x, cy: y, r: 6, fill: peer.here ? colour(index) : "var(--line)" });
    const anchor = side > 0.3 ? "start" : side < -0.3 ? "end" : "middle";
    const away = anchor === "start" ? 10 : anchor === "end" ? -10 : 0;
    parts.push(spot, draw("text", { class: "name", x: x + away, y: y + (away ? 4 : y < height / 2 ? -10 : 20), "text-anchor": anchor }, peer.name.slice(0, 12)));
  }
  svg.replaceChildren(...parts);
}

const COLUMNS = [
  ["Peer", null], ["State", (p) => p.doing], ["Round", (p) => `${p.round}`], ["Step", (p) => `${p.step}`],
  ["Loss", (p) => number(p.loss)], ["With", (p) => p.partners.slice(0, 3).join(", ") || "–"], ["Steps/s", (p) => number(p.steps_per_s, 1)],
  ["Tokens/s", (p) => tokens(p.tokens_per_s, p.mfu)],
  ["Lag", lag], ["Up", (p) => `${bytes(p.sent_per_s)}/s`], ["Down", (p) => `${bytes(p.received_per_s)}/s`], ["Reward", (p) => number(p.reward)],
  ["Faults", (p) => p.faults.map(([name, count]) => `${name} ${count}`).join(", ") || "–"], ["Heard", (p) => `${p.age.toFixed(0)} s ago`],
];

function table(peers) {
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.peer : null;
  byId("columns").replaceChildren(...COLUMNS.map(([name]) => make("th", { scope: "col" }, name)));
  byId("peers").replaceChildren(...peers.map((peer, index) => {
    const row = make("tr", { class: peer.here ? "" : "gone" });
    const first = make("td"), mark = make("span", { class: "mark", "aria-hidden": "true" });
    mark.style.background = colour(index);
    const button = make("button", { type: "button", "aria-pressed": String(chosen === peer.id), title: peer.id, "data-peer": peer.id });
    button.append(mark, peer.name);
    button.addEventListener("click", () => { chosen = chosen === peer.id ? null : peer.id; show(last); });
    first.append(button);
    row.append(first, ...COLUMNS.slice(1).map(([, text]) => make("td", {}, text(peer))));
    return row;
  }));
  if (focused) [...document.querySelectorAll("[data-peer]")].find((found) => found.dataset.peer === focused)?.focus();
}

function news(items) {
  byId("news").replaceChildren(...items.slice(-100).reverse().map(([time, kind, text]) => {
    const line = make("li", { class: kind });
    line.append(make("time", {}, new Date(time * 1000).toLocaleTimeString()), text);
    return line;
  }));
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
  document.title = `${picture.totals.peers} peers · ${title}`;
  const silent = picture.totals.connected === 0 && !picture.ended;
  byId("state").textContent = picture.ended ? "end of the recording" : silent ? "no connection to any peer" : plural(picture.totals.connected, "connection");
  tiles(picture);
  chart(byId("loss"), picture.peers, "curve", picture.means.curve, "loss, nats");
  byId("reward-section").hidden = !picture.peers.some((peer) => peer.rewards.length);
  chart(byId("reward"), picture.peers, "rewards", picture.means.rewards, "reward");
  graph(byId("graph"), picture);
  table(picture.peers);
  news(picture.news);
  invite(picture.link);
}

byId("copy").addEventListener("click", copy);

byId("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  show(last);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(last));
addEventListener("resize", () => show(last));
show(JSON.parse(byId("first").textContent)); // so that it shows something before the stream is there
const source = new EventSource("events");
source.addEventListener("message", (event) => show(JSON.parse(event.data)));
source.addEventListener("error", () => { byId("state").textContent = "shoal watch has ended, or cannot be reached"; });
