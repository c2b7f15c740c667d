// Requests as lanes on an axis of time that moves to the left: what runs now grows at the right edge.

import { byId, count, make, style, write } from "./dom.js";

const ROW_PX = 18, RULER_PX = 34, WINDOWS_S = [5, 10, 20, 40, 80, 160, 320, 640];
const AHEAD_S = 3;  // A bar that grows is drawn longer; the edge hides what has not come.
const rows = new Map();  // By the place of a request: its row and its parts.
let scale = null;

export function drawLanes(state, show) {
  const view = byId("lane-view"), strip = byId("lane-strip");
  const wanted = windowFor(state), width = view.clientWidth;
  if (!scale || scale.window !== wanted || scale.width !== width) scale = { window: wanted, width, epoch: state.at };
  const x = (at) => ((at - scale.epoch) * width) / scale.window;
  settleRows(state, show);
  let open = 0;
  for (const lane of state.lanes) {
    const [, place, , tokens, phase, isOver] = lane;
    const row = rows.get(place);
    row.lane = lane;
    open += !isOver;
    row.name.classList.toggle("over", isOver);
    write(row.tokens, isOver && !["stop", "length"].includes(phase) ? phase.replaceAll("_", " ") : count(tokens));
    drawSegments(row, lane, state.at, x);
  }
  const high = `${RULER_PX + ROW_PX * (Math.max(0, ...[...rows.values()].map((row) => row.slot)) + 1)}px`;
  for (const column of [strip, byId("lane-names"), byId("lane-tokens")]) style(column, "height", high);
  drawMarks(state, x);
  drawRuler(wanted);
  const more = state.open > open ? ` of ${count(state.open)} open` : " open";
  write(byId("lane-count"), `${open}${more} · ${wanted} s across`);
  // From where the strip is to where it must be when the next state comes.
  style(strip, "transform", `translateX(${width - x(state.at + 1)}px)`);
}

// Twice what most of them take, so that whole requests are seen.
function windowFor(state) {
  const ages = state.lanes.map((lane) => -lane[11][0][1] / 1e3).sort((a, b) => a - b);
  const most = ages[Math.floor(ages.length * 0.9)] ?? 0;
  return WINDOWS_S.find((window) => window >= 1.2 * most && window >= 10) ?? WINDOWS_S.at(-1);
}

// A lane keeps its row until it goes: then the next one takes it.
function settleRows(state, show) {
  const here = new Set(state.lanes.map((lane) => lane[1]));
  for (const [place, row] of rows) {
    if (here.has(place)) continue;
    for (const part of [row.name, row.bars, row.tokens]) part.remove();
    rows.delete(place);
  }
  const taken = new Set([...rows.values()].map((row) => row.slot));
  let slot = 0;
  for (const lane of state.lanes) {
    if (rows.has(lane[1])) continue;
    while (taken.has(slot)) slot += 1;
    taken.add(slot);
    rows.set(lane[1], newRow(lane, slot, show));
  }
}

function newRow(lane, slot, show) {
  const row = { slot, name: make("button", "lane-name", lane[0]), bars: make("div", "bars"), tokens: make("span", "lane-token"), lane };
  row.name.title = lane[0];
  row.name.dataset.request = lane[0];
  for (const part of [row.name, row.bars, row.tokens]) style(part, "top", `${RULER_PX + slot * ROW_PX}px`);
  for (const part of [row.name, row.bars]) part.addEventListener("click", () => show(row.lane));
  byId("lane-names").append(row.name);
  byId("lane-strip").append(row.bars);
  byId("lane-tokens").append(row.tokens);
  return row;
}

function drawSegments(row, lane, at, x) {
  const [, , prompt, , phase, isOver, , , cached, chunks, predicted, segments] = lane;
  const wanted = segments.length + (predicted === null ? 0 : 1);
  while (row.bars.children.length > wanted) row.bars.lastChild.remove();
  while (row.bars.children.length < wanted) row.bars.append(make("i"));
  segments.forEach(([kind, begin, end], number) => {
    const bar = row.bars.children[number], grows = !isOver && end === 0 && kind === phase;
    place(bar, x(at + begin / 1e3), x(at + end / 1e3 + (grows ? AHEAD_S : 0)));
    bar.className = grows ? `${kind} grows` : kind;
    const split = kind === "prefill" && chunks > 1;
    style(bar, "backgroundSize", split ? `${100 / chunks}% 100%` : "");
    bar.classList.toggle("chunks", split);
    bar.title = title(kind, end - begin, prompt, cached, chunks);
  });
  if (predicted !== null) {
    const expected = row.bars.lastChild;
    expected.className = "predicted";
    expected.title = "first token expected";
    place(expected, x(at + predicted / 1e3) - 1, x(at + predicted / 1e3) + 1);
  }
}

function title(kind, ms, prompt, cached, chunks) {
  const took = `${kind} ${(ms / 1e3).toFixed(3)} s`;
  if (kind !== "prefill") return took;
  return `${took}: ${count(prompt)} tokens${cached ? `, ${count(cached)} cached` : ""}${chunks ? `, ${chunks} chunks` : ""}`;
}

function place(bar, left, right) {
  style(bar, "left", `${left.toFixed(1)}px`);
  style(bar, "width", `${Math.max(1, right - left).toFixed(1)}px`);
}

function drawRuler(wanted) {
  const ruler = byId("lane-ruler");
  if (ruler.dataset.window === String(wanted)) return;
  ruler.dataset.window = wanted;
  ruler.replaceChildren(...[0.75, 0.5, 0.25].map((part) => make("span", "", `${-part * wanted} s`)));
}

// Deaths, resumes and the like cross all lanes.
function drawMarks(state, x) {
  const strip = byId("lane-strip");
  for (const old of strip.querySelectorAll(".mark")) old.remove();
  const lines = new Map();  // What happened at one moment is one line.
  for (const [at, kind, who, text] of state.marks) {
    if (at < state.at - scale.window) continue;
    if (!lines.has(at)) lines.set(at, make("div", `mark ${kind}`, "", [make("span")]));
    const line = lines.get(at);
    line.lastChild.textContent ||= who ? `${who} ${kind === "left" ? "lost" : kind}` : kind;
    line.title += `${who} ${text}\n`;
    style(line, "left", `${x(at).toFixed(1)}px`);
  }
  strip.append(...lines.values());
  let free = -Infinity;  // A name that would cover the one before it is left out.
  for (const line of lines.values()) {
    const left = parseFloat(line.style.left);
    if (left < free) line.lastChild.remove();
    else free = left + line.lastChild.offsetWidth + 6;
  }
}
