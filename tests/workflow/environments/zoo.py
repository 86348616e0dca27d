"""Environments for tests: a sound one of turns, a sound simultaneous one, and naughty ones.

Imported by name in child processes: `tests.workflow.environments.zoo:Nim`.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from troupe.processes.frames import frame
from troupe.workflow.environments import (
    Environment,
    IllegalMoveError,
    Observation,
    Properties,
    Reset,
    Step,
)


class Nim(Environment):
    """Take one or two of a heap whose size the seed draws; who takes the last one wins."""

    declared = Properties(
        name="nim", seats=("left", "right"), rules="Take 1 or 2.", zero_sum=True, max_steps=9
    )

    def __init__(self, **changes: Any) -> None:
        self._properties = replace(self.declared, **changes)
        self._heap = 0
        self._mover = 0

    @property
    def properties(self) -> Properties:
        return self._properties

    def reset(self, seed: int) -> Reset:
        self._heap = random.Random(seed).randint(4, 9)
        self._mover = 0
        return Reset(self.declared.seats, (self.seat,), self.observe())

    def step(self, actions: Mapping[str, Any]) -> Step:
        (taken,) = actions.values()
        if taken not in (1, 2) or taken > self._heap:
            raise IllegalMoveError(f"cannot take {taken!r}", seat=self.seat, value=taken)
        self._heap -= taken
        winner = self.seat if self._heap == 0 else None
        self._mover = 1 - self._mover
        over = dict.fromkeys(self.declared.seats, winner is not None)
        rewards = {s: 0.0 if not winner else 1.0 if s == winner else -1.0 for s in over}
        current = () if winner else (self.seat,)
        return Step(self.observe(), rewards, over, dict.fromkeys(over, False), current)

    @property
    def seat(self) -> str:
        return self.declared.seats[self._mover]

    def observe(self) -> dict[str, Observation]:
        legal = {str(n): n for n in (1, 2) if n <= self._heap}
        array = np.array([self._heap], np.int64)
        return {
            seat: Observation(f"heap {self._heap}", legal or None, {"heap": array})
            for seat in self.declared.seats
        }


class Pennies(Environment):
    """Both choose at once, three times; the same choice: both win (cooperative, symmetric)."""

    declared = Properties(
        name="pennies",
        seats=("a", "b"),
        simultaneous=True,
        cooperative=True,
        symmetric=True,
        illegal="random_legal",
        max_steps=3,
    )

    def __init__(self, **changes: Any) -> None:
        self._properties = replace(self.declared, **changes)
        self._round = 0

    @property
    def properties(self) -> Properties:
        return self._properties

    def reset(self, seed: int) -> Reset:
        self._round = 0
        return Reset(("a", "b"), ("a", "b"), self.observe())

    def step(self, actions: Mapping[str, Any]) -> Step:
        for seat, action in actions.items():
            if action not in ("heads", "tails"):
                raise IllegalMoveError(f"no coin shows {action!r}", seat=seat, value=action)
        self._round += 1
        reward = float(actions["a"] == actions["b"])
        over = dict.fromkeys(("a", "b"), self._round == 3)
        current = () if self._round == 3 else ("a", "b")
        rewards = dict.fromkeys(("a", "b"), reward)
        return Step(self.observe(), rewards, over, dict.fromkeys(over, False), current)

    def observe(self) -> dict[str, Observation]:
        legal = {"heads": "heads", "tails": "tails"}
        return {seat: Observation(f"round {self._round}", legal) for seat in ("a", "b")}


FORGED = b'{"ok": {"obs": {}, "rewards": {"left": 77.0}, "terminated": {}, "truncated": {}}}'


def _forge() -> None:
    """Write an answer into all that is open."""
    for descriptor in range(3, 64):
        with suppress(OSError):
            os.write(descriptor, frame(FORGED))


def _forges() -> None:
    if (pid := os.fork()) == 0:
        _forge()
        os._exit(0)
    os.waitpid(pid, 0)


def _forges_by_multiprocessing() -> None:
    process = multiprocessing.get_context("fork").Process(target=_forge)
    process.start()
    process.join()


def _comes_back() -> None:
    """The child returns from the step like its parent."""
    if (pid := os.fork()) != 0:
        os.waitpid(pid, 0)


def _exits() -> None:
    if (pid := os.fork()) == 0:
        raise SystemExit(0)
    os.waitpid(pid, 0)


class Naughty(Nim):
    """Fails in the given way: `what` at `when` (`import`, `init`, `reset` or `step`).

    With `once` (a path) only the first time, whichever process that is in.
    """

    def __init__(self, what: str, when: str, once: str = "", note: str = "") -> None:
        super().__init__()
        self._what, self._when, self._once, self._note = what, when, once, note
        self._misbehave("init")

    def reset(self, seed: int) -> Reset:
        self._misbehave("reset")
        return super().reset(seed)

    def step(self, actions: Mapping[str, Any]) -> Step:
        self._misbehave("step")
        if self._what == "nothing":
            return None  # type: ignore[return-value]
        return super().step(actions)

    def observe(self) -> dict[str, Observation]:
        if self._what == "huge":
            return {seat: Observation("x" * 17_000_000) for seat in self.declared.seats}
        return super().observe()

    def _misbehave(self, now: str) -> None:
        if now != self._when or (self._once and Path(self._once).exists()):
            return
        if self._once:
            Path(self._once).touch()
        match self._what:
            case "raise":
                raise ValueError("a bug of its author")
            case "stop":
                breakpoint()
            case "hang":
                time.sleep(3600)
            case "spin":
                while True:
                    pass
            case "die":
                print("last words", file=sys.stderr, flush=True)
                os._exit(7)
            case "exit":
                raise SystemExit(3)
            case "forks":
                for way in (_forges, _comes_back, _exits, _forges_by_multiprocessing):
                    way()
            case "print":
                print("on the pipe?", flush=True)
                os.write(1, b"\x00\x00\x00\x02{}")
                assert sys.stdin.read() == ""
            case "children":
                child = subprocess.Popen(["sleep", "3600"])
                alone = subprocess.Popen(["sleep", "3600"], start_new_session=True)
                Path(self._note).write_text(f"{os.getpid()} {child.pid} {alone.pid}")
                time.sleep(3600)
