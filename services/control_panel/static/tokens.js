// Replies with their tokens, coloured by values that the trainer and the engine recorded for each.
// A reply is shown as text; the tokens of a part are built when the part comes into view, so that
// a reply of 32,000 tokens scrolls like a short one.
import { byId, el, number } from "./dom.js";

const PART = 500;

// By measure: where a value lies on the scale, from -1 to 1, and what stands at places of the scale.
const SCALES = {
  advantage: { said: "advantage", at: (value, over) => value / (over.advantage || 1), marks: ({ advantage }) => [[-1, number(-advantage)], [0, "0"], [1, `+${number(advantage)}`]] },
  logprob: { said: "log-prob under the engine that drew the token", at: (value) => Math.max(-1, value / 5), marks: () => [[-1, "-5 or less"], [0, "0 (certain)"]] },
  ratio: { said: "trainer's probability over the engine's", at: (value) => Math.max(-1, Math.min(1, Math.log2(value))), marks: () => [[-1, "1/2 or less"], [0, "1"], [1, "2 or more"]] },
  version: {
    said: "version of the policy that drew the token",
    at: (value, { oldest, newest }) => (newest > oldest ? (2 * (value - oldest)) / (newest - oldest) - 1 : 0),
    marks: ({ oldest, newest }) => (newest > oldest ? [[-1, `@${oldest}`], [1, `@${newest}`]] : [[0, `all @${newest}`]]),
  },
};

// The colour at a place of the scale: none in the middle.
const shade = (place) => `color-mix(in srgb, var(${place < 0 ? "--low" : "--high"}) ${Math.round(60 * Math.abs(place))}%, transparent)`;

// A bar with the colours between the first and the last mark, and the marks below it.
function legend(said, marks) {
  const bar = el("span", { class: "scale", "aria-hidden": "true" });
  bar.style.background = `linear-gradient(90deg, ${(marks.length > 1 ? marks.flatMap(([place], i) => (i && marks[i - 1][0] * place < 0 ? [0, place] : [place])) : [0, 0]).map(shade).join(", ")})`;
  return el("span", { class: "token-scale" }, el("span", {}, said), el("span", { class: "scale-box" }, bar, el("span", { class: "scale-marks" }, ...marks.map(([, text]) => el("span", {}, text)))));
}

export class TokenView {
  constructor() {
    this.parts = new Map();
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) this.toggle(entry.target, entry.isIntersecting);
    }, { root: byId("conversation"), rootMargin: "600px" });
    this.clear();
  }

  clear() {
    this.observer.disconnect();
    this.parts.clear();
    this.over = { advantage: 0, oldest: Infinity, newest: -Infinity };
    this.state = null;
    byId("token-legend").replaceChildren();
  }

  // The bubble of a reply. Without tokens it is its text.
  bubble(turn) {
    const tokens = turn.tokens;
    if (!tokens?.texts.length) return el("div", { class: "bubble" }, turn.response || "(nothing)");
    const bubble = el("div", { class: `bubble${tokens.advantages.length ? "" : " untrained"}` });
    for (let start = 0; start < tokens.texts.length; start += PART) {
      const end = Math.min(start + PART, tokens.texts.length);
      const part = el("span", { class: "part" }, tokens.texts.slice(start, end).join(""));
      this.parts.set(part, { turn, tokens, start, end, built: false });
      bubble.append(part);
    }
    return bubble;
  }

  // All bubbles are in the page.
  ready(summary, turns) {
    for (const turn of turns) {
      for (const value of turn.tokens?.advantages ?? []) this.over.advantage = Math.max(this.over.advantage, Math.abs(value));
      for (const { version } of turn.versions) {
        this.over.oldest = Math.min(this.over.oldest, version);
        this.over.newest = Math.max(this.over.newest, version);
      }
    }
    this.kept = turns.some((turn) => turn.tokens?.texts.length);
    this.trained = turns.some((turn) => turn.tokens?.advantages.length);
    this.state = summary;
    for (const part of this.parts.keys()) this.observer.observe(part);
    this.explain();
  }

  explain() {
    const by = byId("token-colour").value;
    // While tokens are coloured, their bubbles are not.
    byId("conversation").dataset.colouring = by;
    let text = "";
    if (this.state && !this.kept) text = "Tokens of this conversation are not kept. They are kept for the first trajectories of one query per step, and for each evaluation's first queries.";
    else if (this.state && (by === "advantage" || by === "ratio") && !this.trained) text = `No ${by}s: ${this.state.evaluation ? "an evaluation is not trained on" : "the trainer has not reported these tokens (yet); a frozen policy has none"}.`;
    byId("token-legend").replaceChildren(text || (by && this.state ? legend(SCALES[by].said, SCALES[by].marks(this.over)) : ""));
  }

  recolour() {
    this.explain();
    for (const [part, about] of this.parts) {
      if (!about.built) continue;
      about.built = false;
      this.toggle(part, true);
    }
  }

  toggle(part, near) {
    const about = this.parts.get(part);
    if (!about || near === about.built) return;
    about.built = near;
    // Distant parts become text again, and keep their place.
    if (near) part.replaceChildren(...this.spans(about));
    else part.textContent = about.tokens.texts.slice(about.start, about.end).join("");
  }

  spans({ turn, tokens, start, end }) {
    const by = byId("token-colour").value;
    const found = [];
    for (let i = start; i < end; i += 1) {
      const value = { advantage: tokens.advantages[i], logprob: tokens.logprobs[i], ratio: tokens.ratios[i], version: versionOf(turn, i) };
      const span = el("span", { class: "token", title: told(tokens.ids[i], value, turn.policy) }, tokens.texts[i]);
      if (by && value[by] !== undefined) span.style.backgroundColor = shade(SCALES[by].at(value[by], this.over));
      found.push(span);
    }
    return found;
  }
}

function versionOf(turn, i) {
  return turn.versions.find((span) => span.start <= i && i < span.end)?.version;
}

function told(id, value, policy) {
  const parts = [`token ${id}`];
  for (const name of ["logprob", "advantage", "ratio"]) if (value[name] !== undefined) parts.push(`${name} ${number(value[name], 4)}`);
  if (value.version !== undefined) parts.push(`${policy}@${value.version}`);
  return parts.join(" · ");
}
