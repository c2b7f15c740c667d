// Times to the first token, times of later tokens and good requests over the last minutes.
//
// The router counts times in the buckets of its histograms. A quantile here is of the last WINDOW_S seconds, within its bucket as if
// all times in it were spread evenly, which is what Prometheus does.

import { byId, clock, make, seconds } from "./dom.js";

const KEPT_S = 300, WINDOW_S = 10, HEIGHT_PX = 170;
const LIMITS = { first: "limit-first", token: "limit-token" }, DEFAULTS = { first: 1, token: 50 };
const samples = [];  // Of each state: its moment, the counts of both histograms, and the requests that ended.
const COLOURS = {
  joined: "--decode", left: "--lost", state: "--push", role: "--prefill", resumed: "--lost",
};
let charts = null, bounds = null, router = "";

for (const [name, id] of Object.entries(LIMITS)) {
  byId(id).value = localStorage.getItem(id) ?? DEFAULTS[name];
  byId(id).addEventListener("change", () => localStorage.setItem(id, byId(id).value));
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { charts = null; });

export function setBounds(roster) {
  if (roster.router !== router) samples.length = 0; // another one counts from elsewhere
  router = roster.router;
  bounds = { first: roster.first_token_bounds_s, token: roster.token_bounds_s };
}

export function noteState(state) {
  const { at, first_tokens: first, token_times: token, ended, latest } = state;
  const restarted = samples.length && total(first) < total(samples.at(-1).first);
  if (restarted) samples.length = 0;
  samples.push({ at, first, token, ended, latest });
  while (samples[0].at < at - KEPT_S) samples.shift();
}

// Draws, and returns the figures of now.
export function drawCharts(state) {
  if (!charts) charts = build();
  const limit = { first: Number(byId(LIMITS.first).value), token: Number(byId(LIMITS.token).value) / 1e3 };
  const points = samples.map((sample, number) => ({ at: sample.at, ...over(window(number), limit) }));
  const column = (name) => points.map((point) => point[name]);
  const series = [["first", "firstMost"], ["token", "tokenMost"], ["good", "ended"]];
  charts.forEach((chart, number) => {
    chart.marks = state.marks;
    const width = chart.root.parentElement.clientWidth;
    if (chart.width !== width) chart.setSize({ width, height: HEIGHT_PX });
    chart.setData([column("at"), ...series[number].map(column)]);
  });
  const { first, token, good } = points.at(-1);
  return { first, token, good: good ?? 0 };
}

// The samples of the last seconds before and with this one.
function window(number) {
  let begin = number;
  while (begin > 0 && samples[begin - 1].at >= samples[number].at - WINDOW_S) begin -= 1;
  return samples.slice(begin, number + 1);
}

function over(some, limit) {
  const [begin, end] = [some[0], some.at(-1)], passed = end.at - begin.at;
  if (!passed) return { first: null, firstMost: null, token: null, tokenMost: null, good: null, ended: null };
  const between = (name) => end[name].map((value, place) => value - begin[name][place]);
  const first = between("first"), token = between("token");
  let good = 0, ended = 0;
  for (const sample of some.slice(1)) {
    const isGood = ([toFirst, each, whole]) => whole && toFirst <= limit.first && each <= limit.token;
    const share = sample.latest.length ? sample.latest.filter(isGood).length / sample.latest.length : 0;
    good += share * sample.ended;
    ended += sample.ended;
  }
  return {
    first: quantile(first, bounds.first, 0.5), firstMost: quantile(first, bounds.first, 0.95),
    token: quantile(token, bounds.token, 0.5), tokenMost: quantile(token, bounds.token, 0.95),
    good: good / passed, ended: ended / passed,
  };
}

const total = (counts) => counts.reduce((sum, value) => sum + value, 0);

function quantile(counts, of, share) {
  const wanted = share * total(counts);
  if (!wanted) return null;
  let passed = 0;
  for (let place = 0; place < of.length; place += 1) {
    if (passed + counts[place] >= wanted) {
      const least = place ? of[place - 1] : 0;
      return least + ((of[place] - least) * (wanted - passed)) / counts[place];
    }
    passed += counts[place];
  }
  return of.at(-1);
}

// --- uPlot -----------------------------------------------------------------------------------------

function build() {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const folder = byId("charts");
  folder.replaceChildren();
  const inSeconds = (_, values) => values.map(seconds), plain = (_, values) => values.map((value) => Number(value.toFixed(2)));
  return [
    ["Time to the first token", ["p50", "p95"], inSeconds, seconds],
    ["Time of a later token", ["p50", "p95"], inSeconds, seconds],
    ["Requests a second", ["good", "all that ended"], plain, (value) => (value ?? 0).toFixed(1)],
  ].map(([title, labels, values, shown]) => {
    const box = make("figure", "", "", [make("figcaption", "", title)]);
    folder.append(box);
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const line = (label, number) => ({
      label, stroke: colour(number ? "--faint" : "--strong"), width: number ? 1 : 2, value: (_, value) => (value === null ? "–" : shown(value)),
      spanGaps: true, points: { show: false },
    });
    const options = {
      width: box.clientWidth, height: HEIGHT_PX, cursor: { y: false, points: { size: 5 } }, legend: { live: true },
      scales: { y: { range: (_, least, most) => [0, Math.max(most ?? 0, 1e-3) * 1.1] } },
      axes: [{ ...axis, size: 24, values: (_, moments) => moments.map(clock) }, { ...axis, values, size: 56 }],
      series: [{ value: (_, at) => (at ? clock(at) : "–") }, ...labels.map(line)],
      hooks: { draw: [(chart) => drawMarks(chart, colour)] },
    };
    const chart = new uPlot(options, [[], [], []], box);
    chart.marks = [];
    return chart;
  });
}

function drawMarks(chart, colour) {
  const { ctx, bbox } = chart, { min, max } = chart.scales.x;
  ctx.save();
  ctx.setLineDash([4, 3]);
  for (const [at, kind] of chart.marks) {
    if (at < min || at > max) continue;
    const x = Math.round(chart.valToPos(at, "x", true)) + 0.5;
    ctx.strokeStyle = colour(COLOURS[kind]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}
