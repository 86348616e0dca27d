"""`troupe workflow try` and `troupe environment check` on code that exits, interrupts, and returns
and raises what cannot be shown."""

from __future__ import annotations

import json

import pytest

from tests.client.conftest import Run
from tests.rollout import hostile_plays
from tests.support.hostile import HALF
from troupe.outcomes import type_name
from troupe.workflow.environments import Environment, Properties
from troupe.workflow.environments.conformance import check


def test_every_outcome_of_a_workflow_is_shown(run: Run) -> None:
    names = hostile_plays.NAMES
    queries = [word for name in names for word in ("--query", json.dumps({"case": name}))]
    play = "tests.rollout.hostile_plays:play"
    # One of them never ends by itself.
    asked = ("workflow", "try", play, "--group-size", "1", "--timeout", "10", *queries)
    status, out, err = run(*asked, "--json")
    assert status == 1, err
    found = json.loads(out)["trajectories"]
    assert len(found) == len(names)
    for name, one in zip(names, found, strict=True):
        fails = hostile_plays.CASES[name][1] is not None
        assert ("failure" in one) == fails, (name, one.get("failure"))
        json.dumps(one, ensure_ascii=False, allow_nan=False).encode()
    status, out, err = run(*asked)
    assert status == 1, err
    out.encode()


PROPERTIES = Properties(name="odd", seats=("a",), max_steps=3)


class Odd(Environment):
    """Raises `error` in the method `where`."""

    def __init__(self, where: str, error: BaseException) -> None:
        self._where, self._error = where, error
        self._at("__init__")

    @property
    def properties(self) -> Properties:
        self._at("properties")
        return PROPERTIES

    def reset(self, seed: int):  # type: ignore[no-untyped-def]
        self._at("reset")

    def step(self, actions):  # type: ignore[no-untyped-def]
        self._at("step")

    def close(self) -> None:
        self._at("close")

    def _at(self, where: str) -> None:
        if where == self._where:
            raise self._error


@pytest.mark.parametrize(
    "error",
    [SystemExit(1), KeyboardInterrupt(), BaseExceptionGroup("g", [SystemExit()]), OSError(HALF)],
    ids=type_name,
)
@pytest.mark.parametrize("where", ["__init__", "properties", "reset", "close"])
def test_an_environment_that_raises_is_broken(where: str, error: BaseException) -> None:
    report = check(lambda: Odd(where, error), seeds=(0,))
    assert not report.ok
    str(report).encode()
