// The fleet as a ring: router, prefill, decode, and back. A few instances are cards, many are cells of a grid.

import { byId, count, make, percent, rate, style, svg, write } from "./dom.js";

const MOST_CARDS = 24, MOST_LABELS = 9;
const ROLES = ["prefill", "decode"];
let built = null;

export function drawFleet(roster, state, before, show) {
  if (built?.roster !== roster) build(roster, show);
  const rows = state.instances.map((row) => Object.fromEntries(roster.figures.map((name, place) => [name, row[place]])));
  drawRouter(roster, state);
  for (const role of ROLES) drawHead(role, rows);
  const passed = before ? state.at - before.at : 0;
  rows.forEach((figures, place) => {
    const former = before?.instances[place];
    const rateOf = (name) => (former ? Math.max(0, figures[name] - former[roster.figure[name]]) / passed : 0);
    figures.rate = rateOf(built.isPrefill[place] ? "prompt_tokens_computed" : "tokens_generated");
    (built.asCells ? fillCell : fillCard)(built.boxes[place], roster.instances[place], figures, roster.of);
  });
  drawWires(roster, state, rows);
}

// --- instances -----------------------------------------------------------------------------------

function build(roster, show) {
  const asCells = roster.instances.length > MOST_CARDS;
  const isPrefill = roster.instances.map((row) => row[roster.of.role] === "prefill");
  const boxes = roster.instances.map((row, place) => {
    const box = asCells ? make("button", "cell") : card(row, roster.of);
    box.addEventListener("click", () => show(place));
    return box;
  });
  for (const role of ROLES) {
    const places = boxes.map((_, place) => place).filter((place) => isPrefill[place] === (role === "prefill"));
    const name = (place) => roster.instances[place][roster.of.id];
    const there = places.sort((a, b) => name(a).localeCompare(name(b), "en", { numeric: true })).map((place) => boxes[place]);
    const empty = make("p", "quiet", role === "prefill" ? "none: decode instances serve whole requests" : "none");
    byId(role).replaceChildren(
      make("h3", "", role),
      make("p", "head"),
      make("div", asCells ? "cells" : "cards", "", there.length ? there : [empty]),
    );
  }
  byId("ring").classList.toggle("large", asCells);
  built = { roster, asCells, isPrefill, boxes };
}

function card(row, of) {
  const parts = [
    make("b", "name", row[of.id]),
    make("span", "state"),
    make("span", "host", `${row[of.role]} · ${row[of.host]}`),
    make("div", "bar", "", [make("i", "held"), make("i", "cached")]),
    make("span", "pages"),
    make("span", "work"),
    make("span", "pace"),
  ];
  const box = make("button", "card", "", parts);
  [, box.state, , box.bar, box.pages, box.work, box.pace] = parts;
  return box;
}

function fillCard(box, row, of_, of) {
  const total = row[of.pages], held = total - of_.pages_free;
  box.classList.toggle("trouble", of_.state !== "live");
  box.classList.toggle("busy", of_.running_requests > 0);
  write(box.state, of_.state === "live" ? "" : of_.state);
  style(box.bar.children[0], "width", `${percent(held, total)}%`);
  style(box.bar.children[1], "width", `${percent(of_.pages_cached, total)}%`);
  const pushing = of_.pushes_in_flight ? ` · ${of_.pushes_in_flight} pushing` : "";
  const flight = pushing + (of_.reservations ? ` · ${of_.reservations} coming` : "");
  const lost = of_.pages_quarantined ? ` · ${count(of_.pages_quarantined)} quarantined` : "";
  write(box.pages, `${count(held)} held · ${count(of_.pages_cached)} cached of ${count(total)}${flight}${lost}`);
  write(box.work, `queue ${count(of_.waiting_requests)} · batch ${count(of_.running_requests)}/${count(row[of.max_running])}`);
  write(box.pace, pace(row[of.role], of_));
}

function pace(role, figures) {
  const what = role === "prefill" ? "prompt tokens/s" : "tokens/s";
  const speed = `${count(figures.rate)} ${what}`;
  if (!figures.pace_us) return speed;
  const each = role === "prefill" ? `${figures.pace_us} µs each` : `${(figures.pace_us / 1e3).toFixed(1)} ms a step`;
  return `${speed} · ${each}`;
}

function fillCell(box, row, of_, of) {
  const held = percent(row[of.pages] - of_.pages_free, row[of.pages]);
  box.className = of_.state === "live" ? "cell" : "cell trouble";
  box.classList.toggle("waiting", of_.waiting_requests > 0);
  if (box.title === "" || box.matches(":hover, :focus")) box.title = `${row[of.id]} (${of_.state})`;
  style(box, "backgroundImage", `linear-gradient(to top, var(--held) ${held}%, transparent ${held}%)`);
}

function drawHead(role, rows) {
  const of = rows.filter((_, place) => built.isPrefill[place] === (role === "prefill"));
  const total = (name) => of.reduce((sum, row) => sum + row[name], 0);
  const trouble = of.filter((row) => row.state !== "live").length;
  const parts = [
    `${of.length} ${of.length === 1 ? "instance" : "instances"}`,
    `queue ${count(total("waiting_requests"))}`,
    `batch ${count(total("running_requests"))}`,
  ];
  if (trouble) parts.push(`${trouble} not live`);
  write(byId(role).children[1], parts.join(" · "));
}

function drawRouter(roster, state) {
  const box = byId("router");
  if (!box.firstChild) box.append(make("h3", "", "router"), make("div", "card", "", [0, 1, 2, 3].map(() => make("span"))));
  const [name, open, how, ready] = box.lastChild.children;
  name.className = "name";
  write(name, roster.router);
  write(open, `${count(state.open)} requests open`);
  write(how, `dispatch ${roster.dispatch} · prefill ${roster.prefill_policy} · decode ${roster.decode_policy}`);
  write(ready, state.unready[0] ?? state.degraded[0] ?? "ready");
  box.lastChild.classList.toggle("trouble", state.unready.length + state.degraded.length > 0);
}

// --- wires ---------------------------------------------------------------------------------------

function drawWires(roster, state, rows) {
  const ring = byId("ring").getBoundingClientRect(), wires = byId("wires");
  const of = (element) => {
    const box = element.getBoundingClientRect();
    return { left: box.left - ring.left, right: box.right - ring.left, top: box.top - ring.top, bottom: box.bottom - ring.top };
  };
  const router = of(byId("router").lastChild ?? byId("router"));
  const boxes = built.asCells ? [] : built.boxes.map(of);
  const [prefill, decode] = ROLES.map((role) => of(byId(role)));
  const down = prefill.top >= router.bottom;
  const parts = [];
  const wire = (from, to, kind, text = "") => parts.push(...curve(from, to, kind, text, down));
  if (built.asCells) {
    wire(router, prefill, "ask");
    wire(prefill, decode, "link ready", links(rows));
  } else {
    boxes.forEach((box, place) => {
      if (built.isPrefill[place]) wire(router, box, rows[place].running_requests ? "ask busy" : "ask");
    });
    const isCrowded = state.links.length > (down ? 1 : MOST_LABELS);
    if (isCrowded) parts.push(...label(prefill, decode, summary(roster, state.links), down));
    state.links.forEach(([source, target, how, speed]) => {
      const carries = roster.instances[source][roster.of.transport];
      const text = isCrowded ? "" : `${carries} ${how === "ready" ? rate(speed) : how}`;
      const busy = rows[target].reservations || rows[source].pushes_in_flight ? " busy" : "";
      if (boxes[source] && boxes[target]) wire(boxes[source], boxes[target], `link ${how}${busy}`, text);
    });
  }
  parts.push(...back(decode, router, ring, down, rows.some((row, place) => !built.isPrefill[place] && row.rate > 0)));
  wires.setAttribute("viewBox", `0 0 ${ring.width} ${ring.height}`);
  wires.replaceChildren(...parts);
}

function links(rows) {
  const total = (name) => rows.reduce((sum, row, place) => sum + (built.isPrefill[place] ? row[name] : 0), 0);
  return `${count(total("links_usable"))} of ${count(total("links"))} links`;
}

// What carries many links, and how fast they are.
function summary(roster, all) {
  const carriers = new Set(all.map(([source]) => roster.instances[source][roster.of.transport]));
  const speeds = all.map(([, , , speed]) => speed).filter(Boolean);
  const ready = all.filter(([, , how]) => how === "ready").length;
  const range = speeds.length ? `, ${rate(Math.min(...speeds))} to ${rate(Math.max(...speeds))}` : "";
  return `${ready} of ${all.length} links ready (${[...carriers].join(", ")}${range})`;
}

function label(from, to, text, down) {
  const x = down ? (from.left + from.right) / 2 : (from.right + to.left) / 2;
  return [svg("text", { x, y: down ? (from.bottom + to.top) / 2 : from.top + 12, class: "link" }, text)];
}

// From the side of one box to the facing side of another one; where the ring stands upright, from its bottom to the other's top.
function curve(from, to, kind, text, down) {
  const [x1, y1] = down ? [(from.left + from.right) / 2, from.bottom] : [from.right, (from.top + from.bottom) / 2];
  const [x2, y2] = down ? [(to.left + to.right) / 2, to.top] : [to.left, (to.top + to.bottom) / 2];
  const [mx, my] = [(x1 + x2) / 2, (y1 + y2) / 2];
  const bend = down ? `C${x1},${my} ${x2},${my}` : `C${mx},${y1} ${mx},${y2}`;
  const parts = [svg("path", { d: `M${x1},${y1} ${bend} ${x2},${y2}`, class: kind })];
  if (!text) return parts;
  const at = Math.abs(y1 - y2) < 40 ? 0.6 : 0.3;  // Crossing lines have their texts apart.
  const weigh = (a, b, c, d) => a * (1 - at) ** 3 + 3 * b * at * (1 - at) ** 2 + 3 * c * at ** 2 * (1 - at) + d * at ** 3;
  const [x, y] = down ? [weigh(x1, x1, x2, x2), weigh(y1, my, my, y2)] : [weigh(x1, mx, mx, x2), weigh(y1, y1, y2, y2)];
  return [...parts, svg("text", { x, y: y - 3, class: kind }, text)];
}

// Tokens go from decode back to the router, below everything else.
function back(decode, router, ring, down, isBusy) {
  const kind = isBusy ? "back busy" : "back";
  if (down) {
    const x = ring.width - 3;
    return [svg("path", { d: `M${decode.right},${decode.top + 20} H${x} V${router.top + 20} H${router.right}`, class: kind })];
  }
  const y = ring.height - 8, [x1, x2] = [(decode.left + decode.right) / 2, (router.left + router.right) / 2];
  const path = svg("path", { d: `M${x1},${decode.bottom} V${y} H${x2} V${router.bottom}`, class: kind });
  return [path, svg("text", { x: (x1 + x2) / 2, y: y - 4, class: kind }, "tokens")];
}
