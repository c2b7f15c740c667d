// The states of the router, as they come, and the parts of the page that show them.

import { byId, clock, count, make, seconds, write } from "./dom.js";
import { drawCharts, noteState, setBounds } from "./charts.js";
import { showInstance, showRequest } from "./details.js";
import { drawFleet } from "./fleet.js";
import { drawLanes } from "./lanes.js";

const SILENCE_MS = 15_000, AGAIN_MS = 2_000, MOST_CHARS = 16 * 2 ** 20;
const KEY = "tandem-control-key", MOST_SHOWN = 40;

// `before` is the state before `state`: rates are differences between the two.
// `frame`: a drawing is due. A page that is not seen gets no frames, and must not wait for one with each state.
const page = { roster: null, state: null, before: null, frame: 0, read };

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Another page of the router, as JSON.
async function read(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store" });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error.message);
  return said;
}

class NeedsKey extends Error {}

// One event after the other, until the router ends the stream. EventSource could not send a key.
async function* events() {
  const stop = new AbortController();
  let timer = setTimeout(() => stop.abort(), SILENCE_MS);
  try {
    const answer = await fetch("cluster/events", { headers: headers(), signal: stop.signal, cache: "no-store" });
    if (answer.status === 401) throw new NeedsKey();
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(), SILENCE_MS);
      const whole = (text + value).split("\n\n");
      text = whole.pop();
      if (text.length > MOST_CHARS) throw new Error("a state is too long");
      for (const event of whole) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    clearTimeout(timer);
    stop.abort();
  }
}

async function look() {
  for (;;) {
    try {
      for await (const said of events()) {
        if (said.type === "roster") setBounds(page.roster = named(said));
        else take(said);
      }
      connection("the router drains: looking for it again", "away");
    } catch (error) {
      if (error instanceof NeedsKey) return askForKey();
      connection(`${error.message || "no answer"}: trying again`, "away");
    }
    page.state = null;
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

// Rows of the roster and of a state are lists; the roster says what is where.
function named(roster) {
  const pick = (names) => Object.fromEntries(names.map((name, place) => [name, place]));
  return { ...roster, of: pick(roster.of_instance), figure: pick(roster.figures) };
}

function take(state) {
  page.before = page.state?.roster === state.roster ? page.state : null;
  page.state = state;
  noteState(state);
  page.frame ||= requestAnimationFrame(draw);
}

function draw() {
  const { roster, state, before } = page;
  page.frame = 0;
  if (state?.roster !== roster.version) return; // the router has gone, or the state of a new roster is on its way
  connection(state.unready[0] ?? state.degraded[0] ?? "live", state.unready.length ? "unready" : "live");
  write(byId("model"), `${roster.model} · ${roster.router}`);
  drawFleet(roster, state, before, (place) => showInstance(page, place));
  drawLanes(state, (lane) => showRequest(page, lane));
  const now = drawCharts(state);
  const tokens = sum(state, "tokens_generated") - (before ? sum(before, "tokens_generated") : NaN);
  const tallies = [
    ["open", count(state.open)],
    ["tokens/s", before ? count(Math.max(0, tokens) / (state.at - before.at)) : "–"],
    ["first token", seconds(now.first)],
    ["later tokens", seconds(now.token)],
    ["good/s", now.good.toFixed(1)],
  ];
  byId("tallies").replaceChildren(...tallies.map(([term, text]) => make("div", "", "", [make("dt", "", term), make("dd", "", text)])));
  drawMarks(state);
}

function sum(state, name) {
  const place = page.roster.figure[name];
  return state.instances.reduce((total, row) => total + row[place], 0);
}

function drawMarks(state) {
  const shown = state.marks.slice(-MOST_SHOWN).reverse();
  const list = byId("marks");
  const last = String(shown[0]);
  if (list.dataset.last === last) return;
  list.dataset.last = last;
  list.replaceChildren(...shown.map(([at, kind, who, text]) => make("li", kind, "", [
    make("time", "", clock(at)),
    make("b", "", who || kind),
    make("span", "", text),
  ])));
  if (!shown.length) list.append(make("li", "quiet", "Nothing has happened to the fleet yet."));
}

function connection(text, kind) {
  const shown = byId("connection");
  shown.className = kind;
  write(shown, text);
}

function askForKey() {
  connection(sessionStorage.getItem(KEY) ? "the key was refused" : "locked", "away");
  sessionStorage.removeItem(KEY);
  byId("ask").hidden = false;
  byId("key").focus();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  byId("ask").hidden = true;
  look();
});
byId("close").addEventListener("click", () => { byId("details").hidden = true; });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") byId("details").hidden = true; });
look();
