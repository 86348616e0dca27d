"""Balancing: moves of engines from idle policies to busy ones.

The pressure of a policy is its backlog per engine. Where the pressures of two policies differ by
more than a threshold, engines of the one move to the other (FlexMARL, inter-agent load balancing;
there: 5 turns per instance). The paper does not say when, how many and which engines move; these
are our rules:

- A difference must last: a burst that is over when the engine arrives is not worth the move.
- A move must lower the difference. It may reverse it only by so little that noise of the size of
  the hysteresis does not cause the opposite move.
- A policy that took an engine gives none for a while, and one that gave takes none.

Under constant backlogs every move lowers the greater of two pressures and raises none above it: the
sorted pressures fall in lexicographic order, so moves end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

# A pair whose moves keep failing rests for this many cool-downs at most.
_MAX_REST = 32
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class BalancingRules:
    """When to move. `threshold` and `hysteresis` are in units of backlog per engine."""

    threshold: float = 5.0
    hysteresis: float = 1.0
    sustain_seconds: float = 2.0
    cooldown_seconds: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.hysteresis <= self.threshold:
            raise ValueError(f"hysteresis = {self.hysteresis} is not within [0, threshold]")


@dataclass(frozen=True, slots=True)
class Demand:
    """A policy's backlog (turns waiting and in flight, or their outstanding tokens) and the number
    of serving engines that it must keep."""

    policy: str
    backlog: float
    minimum: int = 1


@dataclass(frozen=True, slots=True)
class EngineAssignment:
    """One engine and the policy that it serves or, while it moves, will serve.

    `serving`: it takes turns now. `work` decides which engine of a policy moves: the one with
    least.
    """

    engine_id: str
    policy: str
    serving: bool = True
    moving: bool = False
    work: float = 0.0


@dataclass(frozen=True, slots=True)
class Move:
    """Engine `engine_id` moves from policy `source` to `target`. `before` and `after`: the
    difference of their pressures now, and as predicted."""

    engine_id: str
    source: str
    target: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Memory:
    """State that one decision passes to the next. Times are the caller's, in seconds."""

    since: Mapping[Pair, float] = field(default_factory=dict)
    """By (source, target): since when their difference has exceeded the threshold."""
    gave: Mapping[str, float] = field(default_factory=dict)
    """By policy: when it last gave an engine."""
    took: Mapping[str, float] = field(default_factory=dict)
    """By policy: when it last took an engine."""
    failures: Mapping[Pair, tuple[int, float]] = field(default_factory=dict)
    """By (source, target): failed moves since the last success, and when the last one failed."""


def pressure(backlog: float, engines: int) -> float:
    """Return the backlog per engine; infinite when there is work and no engine."""
    if engines:
        return backlog / engines
    return math.inf if backlog > 0 else 0.0


def disparity(demands: Sequence[Demand], assignments: Sequence[EngineAssignment]) -> float:
    """Return the greatest difference of two pressures; 0 for fewer than two policies."""
    engines = _counts(demands, assignments)
    pressures = [pressure(one.backlog, engines[one.policy]) for one in demands]
    return max(pressures) - min(pressures) if len(pressures) > 1 else 0.0


def decide(
    rules: BalancingRules,
    memory: Memory,
    demands: Sequence[Demand],
    assignments: Sequence[EngineAssignment],
    now: float,
    *,
    barred: Collection[Pair] = (),
) -> tuple[list[Move], Memory]:
    """Return the moves that are due now, and the memory for the next decision.

    `assignments`: engines that could serve any of the policies in `demands`; engines of other
    policies are ignored. `barred` pairs of source and target never move. An engine that moves
    already, or that its policy needs to keep `minimum` serving, stays.
    """
    backlogs = {one.policy: one.backlog for one in demands}
    engines = _counts(demands, assignments)
    idle = {one.policy: _idle(one, assignments) for one in demands}
    since: dict[Pair, float] = {}
    for source in backlogs:
        for target in backlogs:
            if source == target or (source, target) in barred:
                continue
            gap = _gap(backlogs, engines, source, target)
            if gap > rules.threshold:
                since[source, target] = memory.since.get((source, target), now)
    ripe = [
        pair
        for pair, began in since.items()
        if now - began >= rules.sustain_seconds and not _rests(rules, memory, pair, now)
    ]
    gave, took = dict(memory.gave), dict(memory.took)
    moves: list[Move] = []
    while True:
        chosen: Move | None = None
        for source, target in ripe:
            # Also within one decision no policy both gives and takes.
            if not idle[source] or took.get(source) == now or gave.get(target) == now:
                continue
            found = _judge(rules, backlogs, engines, source, target)
            if found is not None and (chosen is None or found[0] > chosen.before):
                chosen = Move(idle[source][0], source, target, *found)
        if chosen is None:
            return moves, replace(memory, since=since, gave=gave, took=took)
        moves.append(chosen)
        idle[chosen.source].pop(0)
        engines[chosen.source] -= 1
        engines[chosen.target] += 1
        gave[chosen.source] = took[chosen.target] = now


def succeeded(memory: Memory, source: str, target: str) -> Memory:
    """Return the memory after a move that arrived."""
    failures = {pair: one for pair, one in memory.failures.items() if pair != (source, target)}
    return replace(memory, failures=failures)


def failed(memory: Memory, source: str, target: str, now: float) -> Memory:
    """Return the memory after a move that failed: the pair rests for one cool-down, then for two,
    four, ..."""
    count = memory.failures.get((source, target), (0, 0.0))[0] + 1
    return replace(memory, failures={**memory.failures, (source, target): (count, now)})


def _counts(demands: Sequence[Demand], assignments: Sequence[EngineAssignment]) -> dict[str, int]:
    """Count the engines that serve each policy or move to it."""
    counts = {one.policy: 0 for one in demands}
    for engine in assignments:
        if engine.policy in counts and (engine.serving or engine.moving):
            counts[engine.policy] += 1
    return counts


def _idle(demand: Demand, assignments: Sequence[EngineAssignment]) -> list[str]:
    """Return the engines that the policy could give, least work first."""
    here = [
        engine
        for engine in assignments
        if engine.policy == demand.policy and engine.serving and not engine.moving
    ]
    here.sort(key=lambda engine: (engine.work, engine.engine_id))
    return [engine.engine_id for engine in here[: max(0, len(here) - max(1, demand.minimum))]]


def _gap(
    backlogs: Mapping[str, float], engines: Mapping[str, int], source: str, target: str
) -> float:
    """Return the pressure of `target` minus pressure of `source`; NaN when both are infinite."""
    return pressure(backlogs[target], engines[target]) - pressure(backlogs[source], engines[source])


def _judge(
    rules: BalancingRules,
    backlogs: Mapping[str, float],
    engines: Mapping[str, int],
    source: str,
    target: str,
) -> tuple[float, float] | None:
    """Return the difference before and after a move that is worth it, else None."""
    before = _gap(backlogs, engines, source, target)
    worst = pressure(backlogs[target], engines[target])
    giver = pressure(backlogs[source], engines[source] - 1)
    taker = pressure(backlogs[target], engines[target] + 1)
    good = (
        before > rules.threshold
        and giver < worst
        and giver - taker <= rules.threshold - rules.hysteresis
    )
    return (before, taker - giver) if good else None


def _rests(rules: BalancingRules, memory: Memory, pair: Pair, now: float) -> bool:
    source, target = pair
    pause = rules.cooldown_seconds
    if now < memory.took.get(source, -math.inf) + pause:
        return True
    if now < memory.gave.get(target, -math.inf) + pause:
        return True
    count, at = memory.failures.get(pair, (0, -math.inf))
    return count > 0 and now < at + pause * min(2.0 ** (count - 1), _MAX_REST)
