"""Which engines move from idle policies to busy ones.

The pressure of a policy is its backlog per engine. Where the pressures of two policies differ by
more than a threshold, engines of the one go to the other (FlexMARL, inter-agent load balancing;
there: 5 turns per instance). When, how many and which are ours:

- a difference must last: a burst that is over when the engine arrives is not worth its way;
- a move must lower the difference, and may turn it around by so little only that noise of the size
  of the hysteresis does not ask for the way back;
- a policy that took an engine gives none for a while, and one that gave takes none.

Under constant backlogs every move lowers the greater of two pressures and raises none above it: the
pressures, sorted, fall in lexicographic order, so there is an end to it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

# A pair whose moves keep failing rests this many cool-downs at most.
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
    """A policy's backlog (turns waiting and in flight, or their outstanding tokens), and how many
    serving engines it must keep."""

    policy: str
    backlog: float
    minimum: int = 1


@dataclass(frozen=True, slots=True)
class EngineAssignment:
    """One engine: whom it serves or, while it moves, whom it will serve.

    `serving`: it takes turns now. `work` decides which engine of a policy goes: the one with least.
    """

    engine_id: str
    policy: str
    serving: bool = True
    moving: bool = False
    work: float = 0.0


@dataclass(frozen=True, slots=True)
class Move:
    """Engine `engine_id` goes from policy `source` to `target`; `before` and `after` are the
    difference of their pressures now and as predicted."""

    engine_id: str
    source: str
    target: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Memory:
    """What one decision leaves to the next. Times are the caller's."""

    since: Mapping[Pair, float] = field(default_factory=dict)
    """By (source, target): since when they differ by more than the threshold."""
    gave: Mapping[str, float] = field(default_factory=dict)
    """By policy: when it gave an engine last."""
    took: Mapping[str, float] = field(default_factory=dict)
    """By policy: when it took an engine last."""
    failures: Mapping[Pair, tuple[int, float]] = field(default_factory=dict)
    """By (source, target): how many moves failed since one succeeded, and when the last did."""


def pressure(backlog: float, engines: int) -> float:
    """Backlog per engine; infinite where there is work and nobody to do it."""
    if engines:
        return backlog / engines
    return math.inf if backlog > 0 else 0.0


def disparity(demands: Sequence[Demand], seats: Sequence[EngineAssignment]) -> float:
    """The greatest difference of two pressures; 0 for fewer than two policies."""
    engines = _counts(demands, seats)
    pressures = [pressure(one.backlog, engines[one.policy]) for one in demands]
    return max(pressures) - min(pressures) if len(pressures) > 1 else 0.0


def decide(
    rules: BalancingRules,
    memory: Memory,
    demands: Sequence[Demand],
    seats: Sequence[EngineAssignment],
    now: float,
    *,
    barred: Collection[Pair] = (),
) -> tuple[list[Move], Memory]:
    """The engines to move now, and what to remember.

    `seats` are engines that could serve any of the policies of `demands`; those of other policies
    are ignored. No engine leaves for a policy that it may not serve (`barred` pairs of source and
    target), none that moves already, and none that its policy needs to keep `minimum` serving.
    """
    backlogs = {one.policy: one.backlog for one in demands}
    engines = _counts(demands, seats)
    idle = {one.policy: _idle(one, seats) for one in demands}
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
            # Within one decision, too, nobody both gives and takes.
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
    """An engine has arrived."""
    failures = {pair: one for pair, one in memory.failures.items() if pair != (source, target)}
    return replace(memory, failures=failures)


def failed(memory: Memory, source: str, target: str, now: float) -> Memory:
    """A move did not succeed: the pair rests for a cool-down, then for two, four, ..."""
    count = memory.failures.get((source, target), (0, 0.0))[0] + 1
    return replace(memory, failures={**memory.failures, (source, target): (count, now)})


def _counts(demands: Sequence[Demand], seats: Sequence[EngineAssignment]) -> dict[str, int]:
    """By policy: engines that serve it or are on their way to it."""
    counts = {one.policy: 0 for one in demands}
    for seat in seats:
        if seat.policy in counts and (seat.serving or seat.moving):
            counts[seat.policy] += 1
    return counts


def _idle(demand: Demand, seats: Sequence[EngineAssignment]) -> list[str]:
    """The engines that the policy could give, least work first."""
    here = [
        seat for seat in seats if seat.policy == demand.policy and seat.serving and not seat.moving
    ]
    here.sort(key=lambda seat: (seat.work, seat.engine_id))
    return [seat.engine_id for seat in here[: max(0, len(here) - max(1, demand.minimum))]]


def _gap(
    backlogs: Mapping[str, float], engines: Mapping[str, int], source: str, target: str
) -> float:
    """How much more `target` has to do per engine than `source`; NaN when both are without."""
    return pressure(backlogs[target], engines[target]) - pressure(backlogs[source], engines[source])


def _judge(
    rules: BalancingRules,
    backlogs: Mapping[str, float],
    engines: Mapping[str, int],
    source: str,
    target: str,
) -> tuple[float, float] | None:
    """The difference before and after a move that is worth it, else None."""
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
