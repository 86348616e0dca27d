"""Tests of an environment's interface and declared properties.

    report = check(MyGame)
    assert report.ok, report

or `troupe environment check my_module:MyGame`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from troupe.outcomes import Interruption, described
from troupe.user_code import interruptible
from troupe.workflow.environments import child
from troupe.workflow.environments.contract import Contract
from troupe.workflow.environments.episode import Seating
from troupe.workflow.environments.host import raised_fault
from troupe.workflow.environments.interface import (
    Action,
    Environment,
    EnvironmentFactory,
    Observation,
    Properties,
    Reset,
    Step,
)
from troupe.workflow.errors import (
    EnvironmentContractError,
    EpisodeOverError,
    IllegalMoveError,
    MoveError,
    ObservationTooLargeError,
    RewardNotFiniteError,
    UnknownPlayerError,
    WorkflowError,
)

Mover = Callable[[Observation, random.Random, str], Action]
"""(observation, random, seat) -> action."""

_WORDS = ("yes", "no", "1", "2", "[0]", "[pass]", "hello")


def legal_mover(seen: Observation, draw: random.Random, seat: str) -> Action:
    """Draw a random legal move; if any text is legal, one of a few words."""
    if seen.legal is None:
        return draw.choice(_WORDS)
    return seen.legal[draw.choice(sorted(seen.legal))]


@dataclass(slots=True)
class EpisodeRecord:
    """The record of one episode."""

    seed: int
    reset: Reset
    moves: list[dict[str, Action]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def returns(self) -> dict[str, float]:
        """Sum of rewards by seat."""
        totals = dict.fromkeys(self.reset.agents, 0.0)
        for step in self.steps:
            for seat, reward in step.rewards.items():
                totals[seat] = totals.get(seat, 0.0) + float(reward)
        return totals

    def plain(self) -> list[Any]:
        """Return the episode without infos, as values that `==` compares."""
        first = (self.reset.agents, self.reset.current, plain_observations(self.reset.obs))
        return [first, *(plain_step(step) for step in self.steps)]


def play_randomly(
    environment: Environment,
    seed: int,
    move: Mover = legal_mover,
    *,
    moves: list[dict[str, Action]] | None = None,
    limit: int | None = None,
) -> EpisodeRecord:
    """Play one episode with contract checks, with the given `moves` or else with moves drawn by
    `move`.

    `limit` ends the episode after that number of steps. Raises `WorkflowError`.
    """
    contract = Contract(environment.properties)
    record = EpisodeRecord(seed, contract.began(environment.reset(seed)))
    draw = random.Random(seed)
    obs = record.reset.obs
    bound = environment.properties.max_steps if limit is None else limit
    while contract.current and len(record.steps) < bound:
        number = len(record.steps)
        if moves is not None and (
            number >= len(moves) or set(moves[number]) != set(contract.current)
        ):
            raise EnvironmentContractError(
                f"in step {number} it is the turn of {', '.join(contract.current)}, unlike the "
                "first time",
                field="step.current",
                value=contract.current,
                remedy="Derive all chance from the seed.",
            )
        if moves is not None:
            joint = moves[number]
        else:
            joint = {seat: move(obs[seat], draw, seat) for seat in contract.current}
        contract.moves(joint)
        step = contract.went(environment.step(dict(joint)))
        record.moves.append(dict(joint))
        record.steps.append(step)
        obs = step.obs
    return record


def plain_step(step: Step) -> tuple[Any, ...]:
    """Return a step without infos, as values that `==` compares."""
    return (
        plain_observations(step.obs),
        {seat: float(reward) for seat, reward in step.rewards.items()},
        {seat: bool(flag) for seat, flag in step.terminations.items()},
        {seat: bool(flag) for seat, flag in step.truncations.items()},
        step.current,
    )


def plain_observations(obs: Mapping[str, Observation]) -> dict[str, Any]:
    """Return observations as values that `==` compares; arrays as dtype, shape and bytes."""
    return {
        seat: (
            seen.text,
            None if seen.legal is None else dict(seen.legal),
            {
                name: (array.dtype.str, array.shape, array.tobytes())
                for name, array in (
                    (name, np.asarray(given)) for name, given in seen.arrays.items()
                )
            },
        )
        for seat, seen in obs.items()
    }


TOLERANCE = 1e-6
"""Tolerance in comparisons of rewards."""


class Broken(Exception):
    """The environment fails a check."""


class Inapplicable(Exception):
    """The check does not apply to the declared properties."""


@dataclass
class EnvironmentTrial:
    """The environment under test, with the episodes played so far."""

    make: EnvironmentFactory
    seeds: tuple[int, ...]
    move: Mover
    name: str = "environment"
    records: dict[int, EpisodeRecord] = field(default_factory=dict)
    declared: Properties = field(init=False)
    """Declared properties; the check `interface` sets them."""

    def record(self, seed: int) -> EpisodeRecord:
        """Return the episode of a seed, which is played once, on a separate object."""
        if seed not in self.records:
            with closing(self.make()) as environment:
                self.records[seed] = play_randomly(environment, seed, self.move)
        return self.records[seed]

    def all(self) -> list[EpisodeRecord]:
        """Return the episodes of all seeds."""
        return [self.record(seed) for seed in self.seeds]


def interface(trial: EnvironmentTrial) -> str:
    """Check construction, properties and `reset` of an environment."""
    environment = trial.make()
    if not isinstance(environment, Environment):
        raise Broken(f"makes a {type(environment).__name__}, not an Environment")
    declared = environment.properties
    trial.name, trial.declared = declared.name, declared
    if not declared.seats or len(set(declared.seats)) != len(declared.seats):
        raise Broken(f"properties.seats must name at least one seat once: {declared.seats}")
    if declared.zero_sum and declared.cooperative and len(declared.seats) > 1:
        raise Broken("properties: a game of several seats is not both zero-sum and cooperative")
    if declared.symmetric and not declared.simultaneous:
        raise Broken("properties: only simultaneous games are declared symmetric")
    if declared.max_steps < 1:
        raise Broken(f"properties.max_steps is {declared.max_steps}")
    if environment.properties != declared:
        raise Broken("properties are not constant")
    environment.close()
    with closing(trial.make()) as environment:
        record = play_randomly(environment, trial.seeds[0], trial.move, limit=1)
    return f"seats {', '.join(record.reset.agents)}; first to move: {', '.join(record.moves[0])}"


def same_seed_same_episode(trial: EnvironmentTrial) -> str:
    """Check that seed and moves determine the episode, on new and on used objects."""
    if not trial.declared.deterministic:
        raise Inapplicable("declared not deterministic")
    with closing(trial.make()) as used:
        for record in trial.all():
            with closing(trial.make()) as new:
                _compare(record, new, f"seed {record.seed} on a new object")
            _compare(record, used, f"seed {record.seed} on the same object, reset")
    return f"{len(trial.seeds)} seeds, on new and on used objects"


def instances_independent(trial: EnvironmentTrial) -> str:
    """Check that two objects, played alternately, behave as each does alone."""
    if not trial.declared.deterministic:
        raise Inapplicable("declared not deterministic")
    records = [trial.record(seed) for seed in (trial.seeds[0], trial.seeds[-1])]
    with ExitStack() as opened:
        objects = [opened.enter_context(closing(trial.make())) for _ in records]
        for environment, record in zip(objects, records, strict=True):
            environment.reset(record.seed)
        for number in range(max(len(record.steps) for record in records)):
            for environment, record in zip(objects, records, strict=True):
                if number >= len(record.steps):
                    continue
                step = environment.step(dict(record.moves[number]))
                if plain_step(step) != plain_step(record.steps[number]):
                    raise Broken(
                        f"seed {record.seed}, step {number}: another object, played alternately, "
                        "changes the behaviour of this one"
                    )
    return "two objects, played alternately"


def agents_fixed(trial: EnvironmentTrial) -> str:
    """Check that every seat ends. (The contract refuses unknown seats.)"""
    for record in trial.all():
        ended = {
            seat
            for step in record.steps
            for flags in (step.terminations, step.truncations)
            for seat, flag in flags.items()
            if flag
        }
        if set(record.reset.agents) != ended:
            never = sorted(set(record.reset.agents) - ended)
            raise Broken(f"seed {record.seed}: {', '.join(never)} never ended")
    return "every seat of the reset, and no other, ended"


def terminates(trial: EnvironmentTrial) -> str:
    """Check that episodes end within the declared number of steps."""
    longest = max(len(record.steps) for record in trial.all())
    for record in trial.all():
        if record.steps and record.steps[-1].current:
            raise Broken(f"seed {record.seed}: not over after {len(record.steps)} steps")
    return f"at most {longest} steps of {trial.declared.max_steps} declared"


def rewards_finite(trial: EnvironmentTrial) -> str:
    """Check that all rewards are finite numbers. (The contract refuses others.)"""
    values = [r for record in trial.all() for step in record.steps for r in step.rewards.values()]
    if not all(math.isfinite(value) for value in values):
        raise Broken("a reward is not finite")
    return f"{len(values)} rewards" + (f" in [{min(values):g}, {max(values):g}]" if values else "")


def observations(trial: EnvironmentTrial) -> str:
    """Check that observations are texts within the declared size. (The contract refuses others.)"""
    longest = max(
        len(seen.text)
        for record in trial.all()
        for obs in (record.reset.obs, *(step.obs for step in record.steps))
        for seen in obs.values()
    )
    return f"at most {longest:,} characters of {trial.declared.max_observation_chars:,} declared"


def zero_sum(trial: EnvironmentTrial) -> str:
    """Check that the rewards of every step add up to zero."""
    if not trial.declared.zero_sum:
        raise Inapplicable("not declared")
    for record in trial.all():
        for number, step in enumerate(record.steps):
            total = sum(step.rewards.values())
            scale = max(1.0, *(abs(r) for r in step.rewards.values()), 1.0)
            if abs(total) > TOLERANCE * scale:
                raise Broken(
                    f"seed {record.seed}, step {number}: rewards {dict(step.rewards)} add up to "
                    f"{total:g}"
                )
    return "every step"


def cooperative(trial: EnvironmentTrial) -> str:
    """Check that all seats get the same rewards."""
    if not trial.declared.cooperative:
        raise Inapplicable("not declared")
    for record in trial.all():
        for number, step in enumerate(record.steps):
            rewards = {float(step.rewards.get(seat, 0.0)) for seat in record.reset.agents}
            if max(rewards) - min(rewards) > TOLERANCE:
                raise Broken(f"seed {record.seed}, step {number}: {dict(step.rewards)}")
    return "every step"


def hosted_alike(trial: EnvironmentTrial) -> str:
    """Check that resets, steps and moves survive serialisation for a hosted process."""
    for record in trial.all():
        reset = child.to_reset(_travelled(child.from_reset(record.reset)))
        steps = [child.to_step(_travelled(child.from_step(step))) for step in record.steps]
        moves = _travelled({"moves": record.moves})["moves"]
        arrived = EpisodeRecord(record.seed, reset, moves, steps)
        if arrived.plain() != record.plain() or moves != record.moves:
            raise Broken(
                f"seed {record.seed}: its output is not JSON (tuples and sets among actions "
                "become lists, keys become strings)"
            )
    return "resets, steps and moves as JSON"


def close_repeatable(trial: EnvironmentTrial) -> str:
    """Check that `close` can be called twice: before a reset, during an episode and after it."""
    for when in ("before a reset", "in the middle"):
        environment = trial.make()
        if when == "in the middle":
            environment.reset(trial.seeds[0])
        for _ in range(2):
            try:
                environment.close()
            except Interruption:
                raise
            except BaseException as error:
                raise Broken(f"close {when} raises {described(error)}") from error
    return "before a reset, in the middle of an episode"


def _compare(record: EpisodeRecord, environment: Environment, where: str) -> None:
    try:
        again = play_randomly(environment, record.seed, moves=record.moves)
    except WorkflowError as error:
        raise Broken(f"{where}: {error.message}") from error
    for number, (was, now) in enumerate(zip(record.plain(), again.plain(), strict=False)):
        if was != now:
            what = "the reset" if number == 0 else f"step {number - 1}"
            raise Broken(f"{where}: {what} differs")
    if len(record.steps) != len(again.steps):
        raise Broken(f"{where}: {len(again.steps)} steps instead of {len(record.steps)}")


def _travelled(message: dict[str, Any]) -> dict[str, Any]:
    """Serialise `message` and parse it again."""
    return child.unpack(child.pack(message))


# A move that no game has.
_NONSENSE: Final[Action] = {"no such move": [None, "\x00"]}
# Number of permutations to try: all of four seats.
_PERMUTATIONS: Final = 24


def illegal_move(trial: EnvironmentTrial) -> str:
    """Check that an illegal move raises `IllegalMoveError` and changes nothing (unless the rule is
    `game`)."""
    declared = trial.declared
    record = trial.record(trial.seeds[0])
    if declared.illegal == "game":
        return _game_judges(trial)
    if declared.illegal == "random_legal" and any(
        record.reset.obs[seat].legal is None for seat in record.reset.current
    ):
        raise Broken("the rule is random_legal, but no legal moves are listed to draw from")
    refused = 0
    with closing(trial.make()) as environment:
        environment.reset(record.seed)
        for number, moves in enumerate(record.moves):
            for seat in moves:
                joint: dict[str, Action] = {**moves, seat: _NONSENSE}
                refused += _refuses(environment, joint, f"step {number}, seat '{seat}'")
            step = environment.step(dict(moves))
            if declared.deterministic and plain_step(step) != plain_step(record.steps[number]):
                raise Broken(f"step {number}: an illegal move has changed the state")
    if not refused:
        raise Inapplicable("any move is legal")
    return f"{refused} refused; the game continued unchanged (rule: {declared.illegal})"


def unknown_player(trial: EnvironmentTrial) -> str:
    """Check that the contract refuses moves of unknown seats and moves outside an episode."""
    contract = Contract(trial.declared)
    with closing(trial.make()) as environment:
        _expect(EpisodeOverError, contract, {trial.declared.seats[0]: 0}, "before reset")
        contract.began(environment.reset(trial.seeds[0]))
        _expect(UnknownPlayerError, contract, {"no such seat": 0}, "a move of an unknown seat")
        _expect(UnknownPlayerError, contract, {}, "no move")
    record = trial.record(trial.seeds[0])
    contract.began(record.reset)
    for step in record.steps:
        contract.went(step)
    _expect(EpisodeOverError, contract, record.moves[-1], "after the end")
    return "unknown seats, no seats, before the beginning and after the end"


def seat_permutation(trial: EnvironmentTrial) -> str:
    """Check that permuting the agents permutes the rewards, and that in a symmetric game seats that
    swap moves swap rewards."""
    record = trial.record(trial.seeds[0])
    seats = record.reset.agents
    if len(seats) < 2:
        raise Inapplicable("one seat")
    players = [f"player-{i}" for i in range(len(seats))]
    count = min(math.factorial(len(seats)), _PERMUTATIONS)
    held = set()
    for number in range(count):
        seating = Seating.of(seats, players, permutation=number)
        held.add(tuple(seating.agent_of[seat] for seat in seats))
        returns = _seated_returns(trial, record, seating)
        if trial.declared.deterministic and any(
            abs(returns[seating.agent_of[seat]] - record.returns[seat]) > TOLERANCE
            for seat in seats
        ):
            raise Broken(f"seating {number}: {returns} is not a permutation of {record.returns}")
    if len(held) != count:
        raise Broken(f"{count} seatings, of which only {len(held)} differ")
    if not trial.declared.symmetric:
        return f"{count} seatings"
    _check_symmetry(trial)
    return f"{count} seatings; moves exchanged, rewards exchanged"


def _refuses(environment: Environment, joint: dict[str, Any], where: str) -> int:
    """Return 1 if the move raises `IllegalMoveError`; else raise `Broken`."""
    try:
        environment.step(joint)
    except IllegalMoveError:
        return 1
    except MoveError as error:
        raise Broken(f"{where}: refused as {type(error).__name__}, not as illegal") from error
    except Interruption:
        raise
    except BaseException as error:
        raise Broken(
            f"{where}: an illegal move raises {described(error)}, not IllegalMoveError"
        ) from error
    raise Broken(f"{where}: the move {_NONSENSE!r} was accepted")


def joint_move_order(trial: EnvironmentTrial) -> str:
    """Check that the order of seats in a joint move does not matter."""
    if not trial.declared.simultaneous:
        raise Inapplicable("not simultaneous")
    if not trial.declared.deterministic:
        raise Inapplicable("declared not deterministic")
    for record in trial.all():
        with closing(trial.make()) as environment:
            environment.reset(record.seed)
            for number, joint in enumerate(record.moves):
                step = environment.step(dict(reversed(joint.items())))
                if plain_step(step) != plain_step(record.steps[number]):
                    raise Broken(f"seed {record.seed}, step {number}: the order of seats matters")
    return "every joint move, in reverse order of seats"


def _game_judges(trial: EnvironmentTrial) -> str:
    """Check that a game that accepts any text ends an episode of nonsense."""
    with closing(trial.make()) as environment:
        record = play_randomly(environment, trial.seeds[0], lambda seen, draw, seat: "?!")
    if record.steps[-1].current:
        raise Broken("an episode of nonsense does not end")
    return f"the game ended an episode of nonsense after {len(record.steps)} steps"


def _expect(
    kind: type[MoveError], contract: Contract, actions: dict[str, Action], where: str
) -> None:
    try:
        contract.moves(actions)
    except kind:
        return
    except MoveError as error:
        raise Broken(f"{where}: {type(error).__name__}, not {kind.__name__}") from error
    raise Broken(f"{where} was taken")


def _seated_returns(
    trial: EnvironmentTrial, record: EpisodeRecord, seating: Seating
) -> dict[str, float]:
    """Play the episode again with `seating`, and return the returns by player."""
    with closing(trial.make()) as environment:
        again = play_randomly(environment, record.seed, trial.move)
    return {seating.agent_of[seat]: total for seat, total in again.returns.items()}


def _check_symmetry(trial: EnvironmentTrial) -> None:
    for record in trial.all():
        seats = record.reset.agents
        for order in itertools.islice(itertools.permutations(seats), _PERMUTATIONS):
            renamed = dict(zip(seats, order, strict=True))
            moves = [{renamed[s]: a for s, a in joint.items()} for joint in record.moves]
            with closing(trial.make()) as environment:
                again = play_randomly(environment, record.seed, moves=moves)
            for seat in seats:
                if abs(again.returns[renamed[seat]] - record.returns[seat]) > TOLERANCE:
                    raise Broken(
                        f"seed {record.seed}: moves exchanged as {renamed}, but the returns are "
                        f"{again.returns} after {record.returns}"
                    )


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    ok: bool
    detail: str
    """The fault, or a description of the test."""
    skipped: bool = False
    """The check does not apply to the declared properties."""


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """The results of all checks of one environment."""

    environment: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(finding.ok for finding in self.findings)

    @property
    def broken(self) -> tuple[Finding, ...]:
        """Failed checks."""
        return tuple(finding for finding in self.findings if not finding.ok)

    def __str__(self) -> str:
        lines = [f"{self.environment}: {'conforms' if self.ok else 'does not conform'}"]
        for finding in self.findings:
            mark = "-" if finding.skipped else "ok" if finding.ok else "BROKEN"
            lines.append(f"  {mark:6} {finding.name}: {finding.detail}")
        return "\n".join(lines)


_CHECKS: Final[dict[str, Callable[[EnvironmentTrial], str]]] = {
    "interface": interface,
    "same_seed_same_episode": same_seed_same_episode,
    "instances_independent": instances_independent,
    "agents_fixed": agents_fixed,
    "terminates": terminates,
    "rewards_finite": rewards_finite,
    "observations": observations,
    "zero_sum": zero_sum,
    "cooperative": cooperative,
    "illegal_move": illegal_move,
    "unknown_player": unknown_player,
    "joint_move_order": joint_move_order,
    "seat_permutation": seat_permutation,
    "hosted_alike": hosted_alike,
    "close_repeatable": close_repeatable,
}


def check(
    make: EnvironmentFactory, *, seeds: Sequence[int] = range(5), move: Mover = legal_mover
) -> ConformanceReport:
    """Run all checks on environments made by `make`.

    `move(observation, random, seat)` chooses an action; by default a random legal one. Faults of
    the environment are reported, not raised.
    """
    with interruptible():
        return _report(EnvironmentTrial(make, tuple(seeds), move))


def _report(trial: EnvironmentTrial) -> ConformanceReport:
    findings: list[Finding] = []
    hidden: list[Finding] = []
    for name, attempt in _CHECKS.items():
        try:
            findings.append(Finding(name, True, attempt(trial)))
        except Inapplicable as why:
            findings.append(Finding(name, True, str(why), skipped=True))
        except Broken as why:
            findings.append(Finding(name, False, str(why)))
        except WorkflowError as error:
            owner = _owner(error)
            if owner is not None and owner != name:
                findings.append(Finding(name, True, f"not tried: see {owner}", skipped=True))
                hidden.append(Finding(owner, False, str(error)))
            else:
                findings.append(Finding(name, False, str(error)))
        except Interruption:
            raise
        except BaseException as error:  # code of the environment
            findings.append(Finding(name, False, raised_fault(trial.name, error).message))
        if name == "interface" and not findings[-1].ok:
            break  # later checks depend on it
    if hidden and all(finding.ok for finding in findings):
        findings.append(hidden[0])  # occurred once
    return ConformanceReport(trial.name, tuple(findings))


def _owner(error: WorkflowError) -> str | None:
    """Return the check to which an error of the contract belongs."""
    if isinstance(error, RewardNotFiniteError):
        return "rewards_finite"
    if isinstance(error, ObservationTooLargeError):
        return "observations"
    if error.field == "properties.max_steps":
        return "terminates"
    if error.kind == EnvironmentContractError.kind and (error.field or "").startswith("step."):
        return "agents_fixed"
    return None
