// The list of recent trajectories and the conversation between the agents of one.
import { api, byId, changed, colour, duration, el, number } from "./dom.js";

export class Viewer {
  constructor() {
    this.job = null;
    this.selected = null;
  }

  async refresh(job) {
    if (this.job !== job) {
      this.job = job;
      this.selected = null;
    }
    const { trajectories } = await api(`/api/jobs/${job}/trajectories?limit=60`);
    // Existing rows are kept in place, so that a click hits the right one.
    if (changed(byId("trajectory-list"), [job, trajectories])) {
      byId("trajectory-list").replaceChildren(...trajectories.map((item) => this.row(item)));
    }
    if (!this.selected && trajectories.length) await this.open(trajectories[0].trajectory_id);
  }

  row(item) {
    const rewards = Object.entries(item.rewards).sort();
    const team = item.rewards.team ?? rewards[0]?.[1] ?? 0;
    return el(
      "button",
      {
        class: "row",
        role: "option",
        "data-trajectory": item.trajectory_id,
        "aria-selected": String(item.trajectory_id === this.selected),
        onclick: () => this.open(item.trajectory_id),
      },
      el("span", {}, item.trajectory_id),
      el("span", { class: `pill ${item.state}` }, item.evaluation ? "held-out" : item.state),
      el("small", {}, rewards.map(([agent, value]) => `${agent} ${number(value)}`).join(" · ") || item.reason),
      el("small", {}, `step ${item.step} · ${item.turns} turns · ${duration(item.seconds)}`),
      el("div", { class: "bar" }, el("div", { style: { width: `${Math.max(0, Math.min(1, team)) * 100}%` } })),
    );
  }

  async open(id) {
    this.selected = id;
    for (const row of byId("trajectory-list").children) {
      row.setAttribute("aria-selected", String(row.dataset.trajectory === id));
    }
    const { summary, turns } = await api(`/api/jobs/${this.job}/trajectories/${encodeURIComponent(id)}`);
    const parts = [
      el("h2", {}, `${summary.trajectory_id} `, el("span", { class: `pill ${summary.state}` }, summary.state)),
      summary.reason ? el("p", { class: "problem" }, summary.reason) : null,
      ...turns.map((turn) => this.turn(turn)),
    ];
    byId("conversation").replaceChildren(...parts.filter(Boolean));
  }

  turn(turn) {
    const versions = turn.versions.map((span) => `@${span.version}`).join(" → ");
    const facts = [
      `${turn.policy}${versions}`,
      `${turn.response_tokens} tokens`,
      duration(turn.generate_seconds),
      turn.finish_reason,
      turn.reward === null ? null : `reward ${number(turn.reward)}`,
    ];
    // The last message is shown; earlier ones are folded.
    const asked = turn.messages.at(-1);
    const before = turn.messages.slice(0, -1);
    return el(
      "div",
      { class: "turn", "--speaker": colour(turn.agent) },
      before.length
        ? el(
            "details",
            { class: "prompt" },
            el("summary", {}, `${before.length} earlier message${before.length > 1 ? "s" : ""}`),
            ...before.map((message) => el("pre", {}, `${message.role}: ${message.content}`)),
          )
        : null,
      asked ? el("div", { class: "asked" }, asked.content) : null,
      el("div", { class: "who" }, el("b", {}, turn.agent), facts.filter(Boolean).join(" · ")),
      el("div", { class: "bubble" }, turn.response || "(nothing)"),
    );
  }
}
