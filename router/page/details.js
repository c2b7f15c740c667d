// One request or one instance, in words: what the router tells of it when it is asked.

import { byId, count, make, rate, seconds, terms } from "./dom.js";

function open(title, ...parts) {
  byId("details-title").textContent = title;
  byId("details-body").replaceChildren(...parts);
  byId("details").hidden = false;
}

// What is read must still be wanted when it comes.
async function openWith(title, path, page, parts) {
  const wait = make("p", "quiet", "asking the router");
  open(title, wait);
  let found;
  try {
    found = parts(await page.read(path));
  } catch (error) {
    found = [make("p", "trouble", error.message)];
  }
  if (wait.isConnected) open(title, ...found);
}

// --- a request -------------------------------------------------------------------------------------

export function showRequest(page, lane) {
  const id = lane[0];
  return openWith(id, `requests/${encodeURIComponent(id)}`, page, (said) =>
    said.choices.flatMap((choice) => [
      ...(said.choices.length > 1 ? [make("h3", "", `choice ${choice.index}`)] : []),
      sums(choice),
      ...choice.attempts.flatMap((attempt) => describeAttempt(attempt, choice, page.roster)),
    ]));
}

function sums(choice) {
  const took = choice.durations;
  return terms([
    ["prompt", `${count(choice.prompt_tokens)} tokens`],
    ["answer", `${count(choice.tokens)} tokens, ${choice.ending ?? "goes on"}`],
    ["first token", `${seconds(took.time_to_first_token_s)} (expected: ${seconds(took.predicted_ttft_s)})`],
    ["queue", seconds(took.queue_s)],
    ["prefill", seconds(took.prefill_s)],
    ["push", `${seconds(took.transfer_s)}, of which computing hid all but ${seconds(took.exposed_transfer_s)}`],
    ["decode", seconds(took.decode_s)],
    ["in all", seconds(took.e2e_s)],
  ]);
}

function describeAttempt(attempt, choice, roster) {
  const parts = [make("h3", "", `attempt ${attempt.number}`)];
  parts.push(make("p", "", why(attempt, choice, roster)));
  if (attempt.failure) parts.push(make("p", "trouble", `It was given up (${attempt.resume_reason}): ${attempt.failure}.`));
  for (const told of attempt.instances) parts.push(make("h4", "", `${told.id} (${told.role}) says`), moments(told.times));
  if (!attempt.instances.length) parts.push(make("p", "quiet", "Its instances tell their times when they have let go of it."));
  return parts;
}

function why(attempt, choice, roster) {
  const { grounds, first, decode } = attempt, parts = [];
  const alone = !grounds?.candidates.length;
  const policy = alone && choice.tokens !== 1 ? roster.decode_policy : roster.prefill_policy;
  parts.push(`To ${first} (${policy})`);
  if (grounds) {
    if (grounds.cached_tokens) parts.push(`${count(grounds.cached_tokens)} prompt tokens were cached there`);
    parts.push(grounds.tokens_in_front ? `${count(grounds.tokens_in_front)} prompt tokens were in front` : "nothing was in front");
    if (grounds.predicted_s !== null) parts.push(`the first token was expected within ${seconds(grounds.predicted_s)}`);
    parts.push(alone ? "it serves the request alone" : `then to the best of ${grounds.candidates.join(", ")} (${roster.decode_policy})`);
  }
  if (decode) parts.push(`${decode} had room and took it`);
  return `${parts.join("; ")}.`;
}

// Each moment as seconds from the arrival at that instance.
function moments(times) {
  const at = Object.entries(times).filter(([name, value]) => name.endsWith("_s") && value !== null);
  const words = at.map(([name, value]) => [name.slice(0, -2).replaceAll("_", " "), value - times.accepted_s]);
  const counts = ["cached_tokens", "chunks", "pages_had", "pages_pushed"].filter((name) => times[name]);
  return terms([
    ...words.sort((a, b) => a[1] - b[1]).map(([name, after]) => [name, after ? `+ ${seconds(after)}` : "0"]),
    ...counts.map((name) => [name.replaceAll("_", " "), count(times[name])]),
  ]);
}

// --- an instance -----------------------------------------------------------------------------------

export function showInstance(page, place) {
  const { roster, state } = page, row = roster.instances[place];
  const figures = state?.instances[place] ?? roster.figures.map(() => "–"); // none while the router is away
  const id = row[roster.of.id];
  const about = terms([
    ...roster.of_instance.slice(1).map((name, number) => [name.replaceAll("_", " "), row[number + 1]]),
    ...roster.figures.map((name, number) => [name.replaceAll("_", " "), figures[number]]),
  ]);
  if (row[roster.of.role] !== "prefill") return open(id, about);
  return openWith(id, `cluster?links=${encodeURIComponent(id)}`, page, (said) => [about, ...said.links.flatMap(describeLink)]);
}

function describeLink(link) {
  const traffic = link.traffic ?? {};
  return [
    make("h4", "", `to ${link.peer}: ${link.state}`),
    terms([
      ["carried by", link.detail || "–"],
      ["speed", rate(link.bytes_per_s)],
      ["pushed", `${count((traffic.bytes_pushed ?? 0) / 1e6)} MB in ${count(traffic.pushes ?? 0)} pushes`],
      ["handoffs", count(traffic.handoffs ?? 0)],
      ...(link.warning ? [["warning", link.warning]] : []),
    ]),
  ];
}
