// Replies with their tokens, coloured by values that the trainer and the engine recorded for each.
// A reply is shown as text; the tokens of a part are built when the part comes into view, so that
// a reply of 32,000 tokens scrolls like a short one.
import { byId, colour, el, number } from "./dom.js";

const PART = 500;

// By name: the value of token i, and its colour's position in [-1, 1].
const SCALES = {
  advantage: { said: "advantage: red below 0, green above; strongest at this conversation's largest value", at: (value, most) => value / (most.advantage || 1) },
  logprob: { said: "log-prob under the engine that drew it: stronger colour, less likely (full at -5)", at: (value) => Math.max(-1, value / 5) },
  ratio: { said: "ratio of the trainer's probability to the engine's: red below 1, green above (full at 1/2 and 2)", at: (value) => Math.max(-1, Math.min(1, Math.log2(value))) },
  version: { said: "version of the policy that drew it" },
};

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
    this.most = {};
    byId("token-legend").textContent = "";
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
    for (const turn of turns) for (const value of turn.tokens?.advantages ?? []) this.most.advantage = Math.max(this.most.advantage ?? 0, Math.abs(value));
    this.kept = turns.some((turn) => turn.tokens?.texts.length);
    this.trained = turns.some((turn) => turn.tokens?.advantages.length);
    this.state = summary;
    for (const part of this.parts.keys()) this.observer.observe(part);
    this.explain();
  }

  explain() {
    const by = byId("token-colour").value;
    let text = "";
    if (this.state && !this.kept) text = "Tokens of this conversation are not kept. They are kept for the first trajectories of one query per step, and for each evaluation's first queries.";
    else if (this.state && (by === "advantage" || by === "ratio") && !this.trained) text = `No ${by}s: ${this.state.evaluation ? "an evaluation is not trained on" : "the trainer has not reported these tokens (yet); a frozen policy has none"}.`;
    else if (by) text = SCALES[by].said;
    byId("token-legend").textContent = text;
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
      if (by === "version") {
        if (value.version !== undefined) span.style.backgroundColor = `color-mix(in srgb, ${colour(`version ${value.version % 8}`)} 35%, transparent)`;
      } else if (by && value[by] !== undefined) {
        const strength = SCALES[by].at(value[by], this.most);
        span.style.backgroundColor = `color-mix(in srgb, var(${strength < 0 ? "--low" : "--high"}) ${Math.round(60 * Math.abs(strength))}%, transparent)`;
      }
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
