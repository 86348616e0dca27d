"""The conformance test finds each fault, and only that, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.workflow.environments.zoo import Naughty, Nim, Pennies
from troupe.client.cli.app import main
from troupe.workflow.environments import (
    Environment,
    Observation,
    Properties,
    Reset,
    Step,
)
from troupe.workflow.environments.conformance import ConformanceReport, check


def broken(make: Callable[[], Any]) -> set[str]:
    return {finding.name for finding in check(make).broken}


@pytest.mark.parametrize("make", [Nim, Pennies])
def test_sound_environments_conform(make: Callable[[], Environment]) -> None:
    report = check(make)
    assert report.ok, report
    assert len(report.findings) == 15


class Forgetful(Nim):
    """Its heap depends on how many games were played before, by anybody."""

    games = 0

    def reset(self, seed: int) -> Reset:
        Forgetful.games += 1
        return super().reset(seed + 100 * Forgetful.games)


class Leftover(Nim):
    """An environment whose `reset` does not clear the last episode's state."""

    games = 0

    def reset(self, seed: int) -> Reset:
        self.games += 1
        reset = super().reset(seed)
        return replace(
            reset, obs={s: replace(o, text=f"{o.text} #{self.games}") for s, o in reset.obs.items()}
        )


class Shared(Nim):
    """All objects play on one heap."""

    heap = 0

    @property
    def _heap(self) -> int:
        return Shared.heap

    @_heap.setter
    def _heap(self, value: int) -> None:
        Shared.heap = value


class Stranger(Nim):
    def step(self, actions: Mapping[str, Any]) -> Step:
        step = super().step(actions)
        return replace(step, rewards={**step.rewards, "third": 0.0})


class Undead(Nim):
    """One seat never learns that the game is over."""

    def step(self, actions: Mapping[str, Any]) -> Step:
        step = super().step(actions)
        return replace(step, terminations={**step.terminations, "right": False})


class Endless(Pennies):
    def step(self, actions: Mapping[str, Any]) -> Step:
        self._round = 0
        return super().step(actions)


class Infinite(Nim):
    def step(self, actions: Mapping[str, Any]) -> Step:
        step = super().step(actions)
        return replace(step, rewards={s: math.inf if r > 0 else r for s, r in step.rewards.items()})


class Generous(Nim):
    """The winner gets more than the loser loses."""

    def step(self, actions: Mapping[str, Any]) -> Step:
        step = super().step(actions)
        return replace(step, rewards={s: 2 * r if r > 0 else r for s, r in step.rewards.items()})


class Selfish(Pennies):
    """Declared cooperative and symmetric, but one seat gets more."""

    def step(self, actions: Mapping[str, Any]) -> Step:
        step = super().step(actions)
        return replace(step, rewards={"a": 1.0 if actions["a"] == "heads" else 0.0, "b": 0.0})


class Tolerant(Nim):
    """Takes any move for a one."""

    def step(self, actions: Mapping[str, Any]) -> Step:
        ((seat, action),) = actions.items()
        return super().step({seat: action if action in (1, 2) else 1})


class Crashing(Nim):
    """An illegal move is a TypeError."""

    def step(self, actions: Mapping[str, Any]) -> Step:
        for action in actions.values():
            range(action)
        return super().step(actions)


class Hasty(Nim):
    """Changes its state before it looks at the move."""

    def step(self, actions: Mapping[str, Any]) -> Step:
        self._heap += 1
        try:
            self._heap -= 1 if next(iter(actions.values())) in (1, 2) else 0
            return super().step(actions)
        finally:
            pass


class Firstborn(Pennies):
    """The order in which the seats are written decides."""

    def step(self, actions: Mapping[str, Any]) -> Step:
        step = super().step(actions)
        first = next(iter(actions))
        return replace(step, rewards=dict.fromkeys(("a", "b"), float(first == "a")))


class Tuples(Nim):
    """Its actions are no JSON values."""

    def observe(self) -> dict[str, Observation]:
        return {
            seat: replace(seen, legal={k: (v,) for k, v in (seen.legal or {}).items()} or None)
            for seat, seen in super().observe().items()
        }

    def step(self, actions: Mapping[str, Any]) -> Step:
        return super().step(
            {s: a[0] if isinstance(a, tuple | list) else a for s, a in actions.items()}
        )


class Once(Nim):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed twice")
        self.closed = True


class Wordy(Nim):
    def observe(self) -> dict[str, Observation]:
        seen = super().observe()
        if self._mover:
            return {s: replace(o, text="x" * 200_000) for s, o in seen.items()}
        return seen


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Leftover, {"same_seed_same_episode"}),
        (Shared, {"instances_independent"}),
        (Stranger, {"agents_fixed"}),
        (Undead, {"agents_fixed"}),
        (Endless, {"terminates"}),
        (Infinite, {"rewards_finite"}),
        (Generous, {"zero_sum"}),
        (Selfish, {"cooperative", "seat_permutation"}),
        (Tolerant, {"illegal_move"}),
        (Crashing, {"illegal_move"}),
        (Hasty, {"illegal_move"}),
        (Firstborn, {"joint_move_order", "seat_permutation"}),
        (Tuples, {"hosted_alike"}),
        (Once, {"close_repeatable"}),
        (Wordy, {"observations"}),
        (lambda: "no environment", {"interface"}),
        (lambda: Nim(max_steps=0), {"interface"}),
        (lambda: Pennies(zero_sum=True), {"interface"}),
        (lambda: Nim(symmetric=True), {"interface"}),
        (lambda: Nim(max_steps=2), {"terminates"}),
        (lambda: Naughty("raise", "reset"), {"interface"}),
    ],
)
def test_a_broken_one_is_named(make: Callable[[], Any], names: set[str]) -> None:
    assert broken(make) == names


def test_chance_that_is_not_the_seeds_is_found() -> None:
    assert {"same_seed_same_episode", "instances_independent"} <= broken(Forgetful)


def test_environments_declared_random_are_not_compared() -> None:
    report = check(lambda: Forgetful(deterministic=False))
    assert report.ok, report
    assert {f.name for f in report.findings if f.skipped} >= {"same_seed_same_episode"}


def test_a_report_reads_line_by_line() -> None:
    report: ConformanceReport = check(Generous)
    lines = str(report).splitlines()
    assert lines[0] == "nim: does not conform"
    assert sum("BROKEN" in line for line in lines) == 1
    assert any(line.startswith("  BROKEN zero_sum: seed 0, step") for line in lines)


class Misdeclared(Nim):
    declared = Properties(name="odd", seats=("left", "right"), cooperative=True)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    zoo = "tests.workflow.environments.zoo"
    assert main(["environment", "check", f"{zoo}:Nim", "--arg", "max_steps=20"]) == 0
    assert "nim: conforms" in capsys.readouterr().out
    here = "tests.workflow.environments.test_environment_conformance"
    assert main(["environment", "check", f"{here}:Misdeclared", "--seeds", "2"]) == 1
    assert "BROKEN cooperative" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere:Game"], "module 'nowhere' does not exist"),
        (["tests.workflow.environments.zoo:Chess"], "has no attribute 'Chess'"),
        (["tests.workflow.environments.zoo:os"], "which cannot make environments"),
        (["builtins:dict"], "made a dict, not an `Environment`"),
        (["tests.workflow.environments.zoo:Nim", "--arg", "x"], "not of the form NAME=VALUE"),
    ],
)
def test_the_command_refuses_wrong_input(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["environment", "check", *arguments]) == 2
    assert says in capsys.readouterr().err
