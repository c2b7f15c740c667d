// Elements and words. Every string becomes text: nothing here reads HTML.

export const byId = (id) => document.getElementById(id);

export function make(tag, kind = "", text = "", children = []) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text !== "") made.textContent = text;
  made.append(...children);
  return made;
}

// Writing what is there already would make the browser lay the page out again.
export function write(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

export function style(element, name, value) {
  if (element.style[name] !== value) element.style[name] = value;
}

export function svg(tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

export const count = (number) => Math.round(number).toLocaleString("en");

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1e3).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return value < 99.5 ? `${value.toFixed(2)} s` : `${count(value)} s`;
}

export function rate(bytes) {
  if (!bytes) return "not measured";
  const [unit, size] = bytes >= 1e9 ? ["GB/s", 1e9] : ["MB/s", 1e6];
  return `${(bytes / size).toFixed(bytes / size < 10 ? 1 : 0)} ${unit}`;
}

export const clock = (at) => new Date(at * 1e3).toLocaleTimeString("en", { hour12: false });

export const percent = (part, whole) => (whole ? Math.round((100 * part) / whole) : 0);

// A list of terms and what they are.
export function terms(pairs) {
  return make("dl", "terms", "", pairs.flatMap(([term, text]) => [make("dt", "", term), make("dd", "", String(text))]));
}
