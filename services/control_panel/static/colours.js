// The colours of agents, policies and other names. A colour follows from the name alone, so it is
// the same in every view, after a reload and in every browser. Only among the names of one job, a
// name gives way to an earlier one (by alphabet) of the same colour.
// The colours themselves are in panel.css, for light and for dark: they keep their distance under
// protanopia, deuteranopia and tritanopia, and their contrast with the page.

import { el } from "./dom.js";

export const COLOURS = 8;
// The team belongs to no agent: its colour is a grey.
export const TEAM = "team";
const NEUTRAL = "--team";

// FNV-1a over UTF-16 code units.
function hashed(name) {
  let hash = 0x811c9dc5;
  for (let i = 0; i < name.length; i += 1) hash = Math.imul(hash ^ name.charCodeAt(i), 0x01000193) >>> 0;
  return ((hash ^ (hash >>> 16)) >>> 0) % COLOURS;
}

// Returns the number of the colour of each name: distinct among up to COLOURS names, then again.
export function assign(names) {
  const numbers = new Map();
  const used = new Set();
  for (const name of names) {
    if (numbers.has(name)) continue;
    if (used.size === COLOURS) used.clear();
    let number = hashed(name);
    while (used.has(number)) number = (number + 1) % COLOURS;
    used.add(number);
    numbers.set(name, number);
  }
  return numbers;
}

let cast = new Map();

// The agents and policies of the chosen job; its specification is null until it is known.
export function setCast(spec) {
  cast = assign([...Object.keys(spec?.agents ?? {}), ...Object.keys(spec?.policies ?? {})].sort());
}

// Returns the numbers of further names, in colours that the cast leaves free as long as there are any.
export const besideCast = (names) => assign([...cast.keys(), ...names]);

// Returns the CSS variable of a name's colour.
export function variable(name, among = cast) {
  if (!name || name === TEAM) return NEUTRAL;
  return `--series-${(among.get(name) ?? hashed(name)) + 1}`;
}

export const colour = (name, among = cast) => `var(${variable(name, among)})`;

// A name with its colour before it.
export const named = (name, among = cast) => [el("i", { class: "swatch", "--swatch": colour(name, among), "aria-hidden": "true" }), name];
