// Draws /docs: the OpenAPI document as a page, without code from other hosts.

import { byId, el } from "./dom.js";

// Text with its parts in backquotes as code.
const prose = (text) => text.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part));

// The schema behind `$ref`s, one level deep, as text.
function shown(schema, document) {
  if (!schema) return "";
  const named = schema.$ref?.split("/").pop();
  const whole = named ? document.components.schemas[named] : schema;
  if (whole.anyOf) return whole.anyOf.map((one) => shown(one, document)).join(" | ");
  if (whole.type === "array") return `[${whole.items?.$ref?.split("/").pop() ?? whole.items?.type ?? "any"}]`;
  return named ?? whole.type ?? "any";
}

function fields(schema, document) {
  const named = (schema?.$ref ?? schema?.items?.$ref)?.split("/").pop();
  const properties = named && document.components.schemas[named]?.properties;
  if (!properties) return null;
  const rows = Object.entries(properties).map(([name, field]) =>
    el("tr", {}, el("td", {}, el("code", {}, name)), el("td", {}, shown(field, document)), el("td", {}, ...prose(field.description ?? ""))),
  );
  return el("table", {}, ...rows);
}

function content(kinds, document) {
  return Object.entries(kinds ?? {}).map(([kind, { schema }]) =>
    el("div", {}, el("code", {}, kind), ` ${shown(schema, document)}`, fields(schema, document)),
  );
}

function call(method, path, operation, document) {
  const parameters = (operation.parameters ?? []).map((one) =>
    el(
      "tr",
      {},
      el("td", {}, el("code", {}, one.name)),
      el("td", {}, `${one.in}, ${shown(one.schema, document)}${one.required ? ", required" : ""}`),
      el("td", {}, ...prose(one.description ?? one.schema?.description ?? "")),
    ),
  );
  const answers = Object.entries(operation.responses ?? {}).map(([status, answer]) =>
    el("div", {}, el("strong", {}, `${status} `), answer.description ?? "", ...content(answer.content, document)),
  );
  return el(
    "details",
    { class: "card" },
    el("summary", {}, el("strong", {}, `${method.toUpperCase()} `), el("code", {}, path), ` ${operation.summary ?? ""}`),
    el("p", {}, ...prose(operation.description ?? "")),
    parameters.length ? el("table", {}, ...parameters) : null,
    operation.requestBody ? el("h2", {}, "Body") : null,
    ...content(operation.requestBody?.content, document),
    el("h2", {}, "Answers"),
    ...answers,
  );
}

const document_ = await (await fetch("/openapi.json")).json();
byId("about").replaceChildren(...prose(document_.info.description ?? ""));
byId("calls").replaceChildren(
  ...Object.entries(document_.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => call(method, path, operation, document_)),
  ),
);
