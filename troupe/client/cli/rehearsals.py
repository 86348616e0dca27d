"""Trajectories that were tried, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from troupe.client.cli.formats import score

if TYPE_CHECKING:
    from troupe.workflow.trying.rehearsal import Rehearsed
    from troupe.workflow.turns import Turn

_SHOWN: Final = 600


def as_record(one: Rehearsed) -> dict[str, Any]:
    """A trajectory as JSON values."""
    groups = {} if one.played is None else {id(r.turn): r for r in one.played.samples}
    record: dict[str, Any] = {
        "query_id": one.query.id,
        "trajectory_id": one.trajectory_id,
        "query": dict(one.query.data),
        "turns": [_turn_record(turn, groups.get(id(turn))) for turn in one.turns],
    }
    if one.played is not None:
        record["rewards"] = one.played.rewards
        record["metrics"] = one.played.metrics
    if one.failure is not None:
        record["failure"] = {
            "kind": one.failure.kind,
            "message": one.failure.message,
            "remedy": one.failure.remedy,
            "traceback": one.failure.traceback,
        }
    return record


def _turn_record(turn: Turn, sample: Any) -> dict[str, Any]:
    assert turn.reply is not None
    record: dict[str, Any] = {
        "agent": turn.role.name,
        "policy": turn.role.policy,
        "turn": turn.number,
        "messages": [{"role": role, "content": content} for role, content in turn.messages],
        "response": turn.reply.text,
        "finish_reason": turn.reply.finish_reason,
        "prompt_tokens": len(turn.prompt_ids),
        "response_tokens": len(turn.reply.token_ids),
        "reward": turn.reply.reward,
    }
    if sample is not None:
        record["sample"] = {
            "sample_id": sample.sample_id,
            "group_id": sample.group_id,
            "reward": sample.reward,
        }
    return record


def print_rehearsed(console: Console, one: Rehearsed) -> None:
    """The conversation, its rewards, and how it failed."""
    from troupe.workflow.agents import UNAWAITED  # what was tried has loaded it

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    say(f"\n{one.trajectory_id}  {_short(repr(dict(one.query.data)))}", "bold")
    samples = {} if one.played is None else {id(r.turn): r for r in one.played.samples}
    for turn in one.turns:
        assert turn.reply is not None
        drawn = "" if turn.siblings is None else f" ({turn.sibling + 1} of {turn.siblings})"
        say(f"  {turn.role.name}[{turn.number}]{drawn}", "cyan")
        # What siblings have in common is said once.
        if turn.sibling == 0:
            for role, content in turn.messages:
                say(_block(f"{role}: {content}"), "dim")
        say(_block(f"-> {turn.reply.text}"))
        tokens = f"{len(turn.prompt_ids)}+{len(turn.reply.token_ids)} tokens"
        facts = [turn.reply.finish_reason, tokens]
        if row := samples.get(id(turn)):
            facts += [f"reward {score(row.reward)}", f"group {row.group_id}"]
        say(_block(", ".join(facts)), "dim")
    if one.played is not None:
        rewards = "  ".join(f"{name} {score(value)}" for name, value in one.played.rewards.items())
        say(f"  rewards: {rewards or 'none'}", "green")
        if left := one.played.metrics.get(UNAWAITED):
            say(f"  {left:g} turns were asked for and never awaited", "yellow")
        if logged := one.query.metrics:
            say("  logged: " + "  ".join(f"{k} {score(v)}" for k, v in logged.items()), "green")
    if one.failure is not None:
        say(f"  FAILED after {len(one.turns)} turns: {one.failure.kind}", "bold red")
        if one.failure.traceback:
            say(one.failure.traceback)
        said = f"{one.failure.message.rstrip('.')}. {one.failure.remedy}"
        say("  " + " ".join(said.split()), "red")


def print_totals(
    console: Console,
    ended: Sequence[Rehearsed],
    groups: Counter[str],
    agents: Collection[str] = (),
) -> None:
    """Counts, and what would teach nothing; `agents`: those of the job."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    turns: Counter[str] = Counter()
    for one in ended:
        turns.update(turn.role.name for turn in one.turns)
    failed = sum(one.failure is not None for one in ended)
    counted = ", ".join(f"{name} {count}" for name, count in sorted(turns.items())) or "none"
    say(f"\n{len(ended)} trajectories, {failed} failed; turns: {counted}", "bold")
    sizes = Counter(groups.values())
    shown = ", ".join(f"{count} of {size}" for size, count in sorted(sizes.items()))
    say(f"{sum(groups.values())} samples in {len(groups)} groups" + (f": {shown}" if shown else ""))
    if sizes[1]:
        say(
            f"note: {sizes[1]} groups have one sample, which has nothing to be compared with; see "
            "`algorithm.group_by` and `--group-size`",
            "yellow",
        )
    for name in sorted(set(agents) - turns.keys()):
        say(f"note: agent {name} was never asked", "yellow")
    if broken := sum(turn.prefix_broken for one in ended for turn in one.turns):
        say(
            f"note: {broken} turns changed an earlier reply of their agent, so that its tokens "
            "could not be reused",
            "yellow",
        )


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in _short(text).splitlines() or [""])


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"
