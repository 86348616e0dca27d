// The form of a new job: an editor of its YAML that completes and explains fields, and checks the
// whole as one types. The job's JSON schema describes the fields.
import { api, byId, el } from "./dom.js";
import { tagsOf } from "./jobs.js";

const CHECK_AFTER_MS = 350;
const MOST_COMPLETIONS = 60;
const KEY = /^(?:"([^"]*)"|'([^']*)'|([^\s:#{}[\],&*!|>%@`"'-][^:#{}[\],]*?|-[^\s:][^:]*?))\s*:(?=\s|$)/;
const editor = byId("submit-spec");
const list = byId("completions");
let schema = null;

// --- where the cursor is -----------------------------------------------------------------------

// Reads YAML up to `end`. Returns the path of the mapping or value there, its text so far, and
// for each mapping the keys it has so far (`keys`) and the line of each field (`lines`).
// It reads what people write in a job by hand: block and flow mappings and lists, quotes, comments.
export function readYaml(text, end = text.length) {
  const blocks = [{ indent: -1, path: [] }];
  const flows = [];
  const keys = new Map();
  const lines = new Map();
  const know = (path, key, line) => {
    const name = path.join(".");
    if (!keys.has(name)) keys.set(name, new Set());
    keys.get(name).add(key);
    const whole = [...path, key].join(".");
    if (!lines.has(whole)) lines.set(whole, line);
  };
  let here = { path: [], word: "", value: false };
  let at = 0;
  let scalar = -1;
  for (const [number, line] of text.split("\n").entries()) {
    const last = end <= at + line.length;
    const seen = last ? line.slice(0, end - at) : line;
    const indent = seen.match(/^ */)[0].length;
    at += line.length + 1;
    // The lines of a block scalar (`|`, `>`) are text.
    if (scalar >= 0 && (indent > scalar || !seen.trim())) {
      if (!last) continue;
      return { ...here, keys, lines, value: true, word: "", text: true };
    }
    scalar = -1;
    let column = indent;
    let rest = seen.slice(indent);
    if (!flows.length) {
      if (rest.startsWith("#")) {
        if (last) return { path: [], word: "", value: true, text: true, keys, lines };
        continue;
      }
      // A list may be indented as deep as its key.
      const item = rest.startsWith("- ") || rest === "-";
      const over = (block) => block.indent > indent || (block.indent === indent && !(item && block.path.at(-1) !== "[]"));
      if (rest.trim() || last) while (blocks.length > 1 && over(blocks.at(-1))) blocks.pop();
      let top = blocks.at(-1);
      while (rest.startsWith("- ") || rest === "-") {
        const path = [...top.path, "[]"];
        blocks.push((top = { indent: column, path }));
        const skip = rest.match(/^-\s*/)[0].length;
        column += skip;
        rest = rest.slice(skip);
      }
      here = { path: top.path, word: rest, value: false, indent: column };
      const match = rest.match(KEY);
      if (match) {
        const key = match[1] ?? match[2] ?? match[3];
        know(top.path, key, number);
        const path = [...top.path, key];
        blocks.push({ indent: column, path });
        rest = rest.slice(match[0].length);
        here = { path, word: rest.trimStart(), value: true, indent: column };
        if (/^\s*[|>][+-]?\s*$/.test(rest)) scalar = column;
      }
    }
    // Flow mappings and lists, which may span lines.
    let quote = "";
    let word = "";
    const base = flows.length ? null : here.path;
    for (let i = 0; i < rest.length; i += 1) {
      const letter = rest[i];
      const top = flows.at(-1);
      if (quote) {
        if (letter === quote) quote = "";
        word += letter;
      } else if (letter === "#" && (i === 0 || rest[i - 1] === " ")) {
        if (last) return { path: [], word: "", value: true, text: true, keys, lines };
        break;
      } else if ((letter === '"' || letter === "'") && !word.trim()) {
        quote = letter;
        word += letter;
      } else if ((letter === "{" || letter === "[") && !word.trim()) {
        const path = top ? (top.map ? [...top.path, top.key ?? ""] : [...top.path, "[]"]) : base;
        flows.push({ map: letter === "{", path, key: null });
        word = "";
      } else if (!top) {
        word += letter;
      } else if (letter === "}" || letter === "]") {
        flows.pop();
        word = "";
      } else if (letter === ",") {
        top.key = null;
        word = "";
      } else if (letter === ":" && top.map && top.key === null && (rest[i + 1] ?? " ") === " ") {
        top.key = word.trim().replace(/^["']|["']$/g, "");
        know(top.path, top.key, number);
        word = "";
      } else {
        word += letter;
      }
    }
    const top = flows.at(-1);
    if (top) {
      const path = top.map ? (top.key === null ? top.path : [...top.path, top.key]) : [...top.path, "[]"];
      here = { path, word: word.trimStart(), value: !top.map || top.key !== null, flow: true, indent: here.indent };
    }
    if (last) break;
  }
  return { ...here, keys, lines };
}

// --- what the schema knows ---------------------------------------------------------------------

const follow = (node) => (node?.$ref ? schema.$defs[node.$ref.split("/").pop()] : node);

// A schema without `$ref`, and the alternatives of an `anyOf` one by one.
function alternatives(node) {
  const found = follow(node);
  if (!found) return [];
  const either = found.anyOf ?? found.oneOf ?? found.allOf;
  const inner = either ? either.flatMap(alternatives) : [];
  return either ? inner.map((one) => ({ ...one, description: found.description ?? one.description, default: found.default ?? one.default })) : [{ ...found, description: node.description ?? found.description, default: node.default ?? found.default }];
}

// The schemas that a value at `path` may have.
export function schemasAt(path) {
  let nodes = alternatives(schema);
  for (const part of path) {
    nodes = nodes.flatMap((node) => {
      const next = part === "[]" ? node.items : (node.properties?.[part] ?? (typeof node.additionalProperties === "object" ? node.additionalProperties : null));
      return next ? alternatives(next) : [];
    });
  }
  return nodes;
}

const kind = (nodes) => [...new Set(nodes.map((node) => (node.enum ? node.enum.join(" | ") : "const" in node ? String(node.const) : node.properties ? "section" : node.type)).filter((name) => name && name !== "null"))].join(", ");

// Completions at a position, each with the text to insert.
function completions(place) {
  if (place.text || !schema) return [];
  const wanted = place.word.replace(/^["']/, "").toLowerCase();
  const fits = (name) => name.toLowerCase().startsWith(wanted) || (wanted.length > 1 && name.toLowerCase().includes(wanted));
  const found = [];
  const keysOf = (nodes, path) => {
    const taken = place.keys.get(path.join(".")) ?? new Set();
    for (const node of nodes) {
      for (const [name, field] of Object.entries(node.properties ?? {})) {
        if (taken.has(name) && name !== place.word) continue;
        if (!fits(name) || found.some((one) => one.name === name)) continue;
        const inner = alternatives(field);
        const section = inner.some((one) => one.properties || one.type === "object") && !place.flow;
        found.push({ name, note: kind(inner), must: node.required?.includes(name), put: section ? `${name}:\n${" ".repeat((place.indent ?? 0) + 2)}` : `${name}: ` });
      }
    }
  };
  if (!place.value) {
    keysOf(schemasAt(place.path), place.path);
    return found.sort((a, b) => Number(b.must ?? 0) - Number(a.must ?? 0)).slice(0, MOST_COMPLETIONS);
  }
  const offer = (value, note) => {
    const name = String(value);
    if (fits(name) && !found.some((one) => one.name === name)) found.push({ name, note, put: name });
  };
  // Names that the job itself defines.
  if (place.path.at(-1) === "policy") for (const name of place.keys.get("policies") ?? []) offer(name, "policy of this job");
  for (const node of schemasAt(place.path)) {
    for (const value of node.enum ?? []) offer(value, "");
    if ("const" in node) offer(node.const, "");
    if (node.type === "boolean") [true, false].forEach((value) => offer(value, ""));
    if (["string", "number", "integer", "boolean"].includes(typeof node.default)) offer(node.default, "default");
  }
  return found.slice(0, MOST_COMPLETIONS);
}

// The field at the cursor, in words.
function explain(place) {
  const path = place.path.filter((part) => part !== "[]");
  const exact = !place.value && /^[\w-]+$/.test(place.word) ? schemasAt([...place.path, place.word]) : [];
  const nodes = exact.length ? exact : schemasAt(place.path);
  byId("field-path").textContent = [...path, ...(exact.length ? [place.word] : [])].join(".");
  const node = nodes.find((one) => one.description) ?? nodes[0];
  const parts = [kind(nodes), node?.default !== undefined && node.default !== null && typeof node.default !== "object" ? `default ${node.default}` : ""].filter(Boolean);
  byId("field-help").replaceChildren(...(nodes.length ? [node.description ?? "", parts.length ? el("small", {}, ` (${parts.join("; ")})`) : ""] : ["There is no such field."]));
}

// --- the list of completions -------------------------------------------------------------------

let offered = [];
let active = 0;

function close() {
  list.hidden = true;
  offered = [];
  editor.removeAttribute("aria-activedescendant");
}

function show(found) {
  offered = found;
  active = 0;
  if (!found.length) return close();
  list.replaceChildren(...found.map((one, i) => el("li", { role: "option", id: `completion-${i}`, "aria-selected": String(i === 0), onmousedown: (event) => { event.preventDefault(); take(i); } }, el("b", {}, one.name), el("small", {}, one.must ? `${one.note} · must be given` : one.note))));
  // Below the line of the cursor; the editor's font is monospaced.
  const before = editor.value.slice(0, editor.selectionStart).split("\n");
  const style = getComputedStyle(editor);
  const line = parseFloat(style.lineHeight);
  const letter = document.createElement("canvas").getContext("2d");
  letter.font = style.font;
  const left = Math.min(before.at(-1).length * letter.measureText("0").width, Math.max(0, editor.clientWidth - 300));
  list.style.top = `${before.length * line - editor.scrollTop + 10}px`;
  list.style.left = `${left + 8}px`;
  list.hidden = false;
  editor.setAttribute("aria-activedescendant", "completion-0");
}

function move(by) {
  list.children[active].setAttribute("aria-selected", "false");
  active = (active + by + offered.length) % offered.length;
  list.children[active].setAttribute("aria-selected", "true");
  list.children[active].scrollIntoView({ block: "nearest" });
  editor.setAttribute("aria-activedescendant", `completion-${active}`);
}

function take(i) {
  const place = readYaml(editor.value, editor.selectionStart);
  const start = editor.selectionStart - place.word.length;
  const space = place.value && editor.value[start - 1] === ":" ? " " : "";
  editor.setRangeText(space + offered[i].put, start, editor.selectionEnd, "end");
  close();
  editor.dispatchEvent(new Event("input"));
}

function complete(asked) {
  const place = readYaml(editor.value, editor.selectionStart);
  explain(place);
  const found = asked || place.word ? completions(place) : [];
  if (!asked && found.length === 1 && found[0].name === place.word) close();
  else show(found);
}

editor.addEventListener("keydown", (event) => {
  if (event.key === " " && event.ctrlKey) {
    event.preventDefault();
    complete(true);
  } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    submit();
  } else if (!list.hidden && ["ArrowDown", "ArrowUp"].includes(event.key)) {
    event.preventDefault();
    move(event.key === "ArrowDown" ? 1 : -1);
  } else if (!list.hidden && ["Enter", "Tab"].includes(event.key) && !event.shiftKey) {
    event.preventDefault();
    take(active);
  } else if (!list.hidden && event.key === "Escape") {
    close();
  } else if (event.key === "Enter" && !event.isComposing) {
    // The next line is indented like this one, or deeper below a section's name.
    event.preventDefault();
    const line = editor.value.slice(0, editor.selectionStart).split("\n").at(-1);
    const deeper = /:\s*$/.test(line) ? 2 : 0;
    editor.setRangeText(`\n${" ".repeat(line.match(/^ */)[0].length + deeper)}`, editor.selectionStart, editor.selectionEnd, "end");
    editor.dispatchEvent(new Event("input"));
  }
});
editor.addEventListener("blur", close);
for (const event of ["keyup", "click"]) editor.addEventListener(event, ({ key }) => { if (!key || key.startsWith("Arrow") && list.hidden || key === "Home" || key === "End") explain(readYaml(editor.value, editor.selectionStart)); });

// --- checking and submitting -------------------------------------------------------------------

let due = 0;
let checks = 0;
editor.addEventListener("input", () => {
  complete(false);
  clearTimeout(due);
  due = setTimeout(() => check().catch((error) => (byId("submit-checked").textContent = error.message)), CHECK_AFTER_MS);
});

async function check() {
  const text = editor.value;
  checks += 1;
  const mine = checks;
  const found = text.trim() ? await api("/api/specification/check", yaml(text)) : { problems: [], advice: [] };
  // A newer text is being checked.
  if (mine !== checks) return;
  byId("submit-checked").textContent = !text.trim() ? "" : found.problems.length ? `${found.problems.length} to fix` : `valid: ${found.summary}`;
  const { lines } = readYaml(text);
  byId("submit-problems").replaceChildren(
    ...found.problems.map((one) => problem(one, lines)),
    ...found.advice.map((line) => el("li", { class: "note" }, line)),
  );
}

const yaml = (text) => ({ method: "POST", headers: { "content-type": "application/yaml" }, body: text });

// A problem names its field; the fault is at the nearest line that has a part of its path.
function problem(one, lines) {
  const parts = one.field.split(".");
  let line;
  for (let end = parts.length; end > 0 && line === undefined; end -= 1) line = lines.get(parts.slice(0, end).filter((part) => !/^\d+$/.test(part)).join("."));
  const text = `${one.message}. ${one.remedy ?? ""}`;
  const go = () => {
    const start = editor.value.split("\n").slice(0, line).join("\n").length + (line ? 1 : 0);
    editor.focus();
    editor.setSelectionRange(start, start + editor.value.split("\n")[line].length);
    explain(readYaml(editor.value, start));
  };
  const where = line === undefined ? el("b", {}, one.field) : el("button", { type: "button", class: "link", onclick: go }, `${one.field} (line ${line + 1})`);
  return el("li", {}, where, one.value ? ` = ${one.value}: ` : ": ", text);
}

let sending = false;
async function submit() {
  if (sending) return;
  sending = true;
  byId("submit-send").disabled = true;
  byId("submit-problem").textContent = "";
  try {
    const query = new URLSearchParams(tagsOf(byId("submit-tags").value).map((tag) => ["tag", tag]));
    query.set("notes", byId("submit-notes").value);
    const submitted = await api(`/api/jobs?${query}`, yaml(editor.value));
    dispatchEvent(new CustomEvent("submitted", { detail: submitted.job_id }));
  } catch (error) {
    byId("submit-problem").textContent = error.message;
  } finally {
    sending = false;
    byId("submit-send").disabled = false;
  }
}
byId("submit-send").addEventListener("click", submit);

// Prepares the form. spec: a specification to start from, as JSON, which is valid YAML.
export async function openForm(spec) {
  schema ??= await api("/api/specification/schema");
  if (spec) {
    editor.value = asYaml(spec, 0);
    await check();
  }
  explain(readYaml(editor.value, editor.selectionStart));
}

// Returns a value as block YAML, with leaves as JSON, which is valid YAML.
function asYaml(value, depth) {
  const pad = "  ".repeat(depth);
  return Object.entries(value)
    .filter(([, one]) => one !== null && !(typeof one === "object" && !Object.keys(one).length))
    .map(([name, one]) => (typeof one === "object" && !Array.isArray(one) ? `${pad}${name}:\n${asYaml(one, depth + 1)}` : `${pad}${name}: ${JSON.stringify(one)}\n`))
    .join("");
}
