"use strict";
// Map of the peers by role, and the exchanges between them: those of the newest rounds bright, older ones faint.
/* global draw, colour, plural */

const PEERS_ON_MAP = 48, LIVE_S = 3; // seconds for which an exchange counts as new

// Shape by role: a circle trains, a diamond also verifies, a square is a bootstrap node; hollow is silent or gone.
function spot(x, y, role, fill, relayed) {
  const looks = { fill, stroke: fill === "none" ? "var(--faint)" : fill, "stroke-width": 2 };
  const shape = role === "verifies" ? draw("path", { d: `M${x} ${y - 8}L${x + 8} ${y}L${x} ${y + 8}L${x - 8} ${y}z`, ...looks })
    : role === "bootstrap" ? draw("rect", { x: x - 6, y: y - 6, width: 12, height: 12, ...looks })
    : draw("circle", { cx: x, cy: y, r: 6.5, ...looks });
  const parts = [shape];
  if (relayed) parts.push(draw("circle", { cx: x, cy: y, r: 12, class: "relayed" }));
  return parts;
}

function drawMap(svg, picture, chosen) {
  const peers = picture.peers.slice(0, PEERS_ON_MAP), parts = [], place = new Map();
  const width = Math.max(svg.parentElement.clientWidth - 26, 240), height = 200;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const [across, down] = [Math.min(width / 2 - 74, 230), height / 2 - 30];
  const order = [...peers].sort((a, b) => a.number - b.number); // so that a peer stays where it is
  order.forEach((peer, index) => {
    const angle = (2 * Math.PI * index) / order.length - Math.PI / 2;
    place.set(peer.tail, { x: width / 2 + across * Math.cos(angle), y: height / 2 + down * Math.sin(angle), peer, side: Math.cos(angle) });
  });
  const most = Math.max(1, ...picture.pairs.map((pair) => pair[2]));
  const newest = Math.max(0, ...picture.pairs.map((pair) => pair[3]));
  for (const [a, b, count, round, time] of [...picture.pairs].reverse()) {
    const from = place.get(a), to = place.get(b);
    if (!from || !to) continue;
    const mine = !chosen || chosen === from.peer.id || chosen === to.peer.id, live = !picture.ended && picture.now - time < LIVE_S;
    const line = draw("line", {
      class: `${live || round === newest ? "live" : "past"}${live ? " moving" : ""}${mine ? "" : " faded"}`,
      x1: from.x, y1: from.y, x2: to.x, y2: to.y, "stroke-width": live || round === newest ? 3 : (0.5 + (2 * count) / most).toFixed(2),
    });
    line.append(draw("title", {}, `${from.peer.name} and ${to.peer.name}: ${plural(count, "exchange")}, newest in round ${round}`));
    parts.push(line);
  }
  for (const { x, y, peer, side } of place.values()) {
    const role = peer.roles.includes("verifies") ? "verifies" : "trains";
    parts.push(...spot(x, y, role, peer.here ? colour(peer.number) : "none", peer.relayed));
    const anchor = side > 0.3 ? "start" : side < -0.3 ? "end" : "middle", away = anchor === "start" ? 14 : anchor === "end" ? -14 : 0;
    const name = draw("text", { class: peer.here ? "name" : "name gone", x: x + away, y: y + (away ? 4 : y < height / 2 ? -13 : 24), "text-anchor": anchor }, peer.name.slice(0, 14));
    name.append(draw("title", {}, `${peer.name}: ${peer.roles.join(", ")}${peer.relayed ? ", behind a relay" : ""}, ${peer.doing}`));
    parts.push(name);
  }
  picture.bootstrap.forEach((tail, index) => {
    const x = width / 2 + (index - (picture.bootstrap.length - 1) / 2) * 40;
    parts.push(...spot(x, height / 2, "bootstrap", "var(--faint)", false), draw("text", { x, y: height / 2 + 22, "text-anchor": "middle" }, "bootstrap"));
  });
  svg.replaceChildren(...parts);
}

// What the shapes mean, of those that are there.
function mapKey(picture) {
  const key = ["● trains"];
  if (picture.peers.some((peer) => peer.roles.includes("verifies"))) key.push("◆ trains and verifies");
  if (picture.bootstrap.length) key.push("■ bootstrap node");
  if (picture.peers.some((peer) => peer.relayed)) key.push("dashed ring: behind a relay");
  if (picture.peers.some((peer) => !peer.here)) key.push("○ silent or gone");
  key.push("bright line: newest exchanges");
  if (picture.peers.length > PEERS_ON_MAP) key.push(`the first ${PEERS_ON_MAP} of ${plural(picture.totals.known, "peer")}`);
  return key.join(" · ");
}

function meetingsInWords(picture) {
  return picture.meetings.map(([round, fragment, groups, alone]) => {
    const parts = groups.map((group) => `${group.slice(0, 8).join(group.length === 2 ? " with " : ", ")}${group.length > 8 ? ` and ${group.length - 8} more` : ""}`);
    if (alone.length) parts.push(`${alone.slice(0, 8).join(", ")} alone`);
    const part = picture.fragments > 1 ? `, part ${fragment + 1} of ${picture.fragments}` : "";
    return `Round ${round}${part}: ${parts.join("; ")}`;
  });
}
