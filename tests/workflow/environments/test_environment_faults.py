"""Faults of environments: typed, counted, and a beginning is repeated on a fresh process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE
from tests.workflow.environments.hosting import (
    QUICK,
    counts,
    gained,
    naughty,
    until_gone,
)
from tests.workflow.environments.zoo import Naughty, Nim
from troupe.workflow import EntrypointError
from troupe.workflow.environments import (
    EnvironmentContractError,
    EnvironmentFault,
    EpisodeOverError,
    FaultLimits,
    Local,
    ObservationTooLargeError,
    hosted,
)


@pytest.mark.parametrize(
    ("what", "reason", "says"),
    [
        ("raise", "raised", "a bug of its author"),
        ("stop", "raised", "there is a breakpoint at zoo.py:.*troupe environment check"),
        pytest.param("exit", "raised", "SystemExit", marks=pytest.mark.slow),
        ("die", "died", "exited with status 7; last words"),
        ("hang", "deadline", "within 0.3 s and was killed"),
        pytest.param("spin", "deadline", "and was killed", marks=pytest.mark.slow),
    ],
)
async def test_a_fault_in_a_step_is_not_repeated(what: str, reason: str, says: str) -> None:
    seconds = 0.3 if reason == "deadline" else PATIENCE
    limits = FaultLimits(step_seconds=seconds, retries=2, backoff_seconds=0.01)
    environment = naughty(what, "step", limits)
    await environment.reset(0)
    pid, before = environment.pid, counts()
    assert pid is not None
    with pytest.raises(EnvironmentFault, match=says) as caught:
        await environment.step({"left": 1})
    assert caught.value.reason == reason
    assert caught.value.kind == "environment"
    assert caught.value.environment in caught.value.message
    assert gained(before) == {"faults": 1} | ({"kills": 1} if reason == "deadline" else {})
    await until_gone(pid)
    with pytest.raises(EpisodeOverError):  # the episode is lost
        await environment.step({"left": 1})
    if what == "die":
        await environment.reset(0)  # on a fresh process
        assert environment.pid != pid
    await environment.close()


async def test_a_process_that_an_environment_forks_does_not_answer_for_it() -> None:
    environment = naughty("forks", "step")
    sound = Local(Nim, name="nim")
    first, other = await environment.reset(0), await sound.reset(0)
    assert first.current == other.current
    for move in ({"left": 1}, {"right": 1}, {"left": 2}):
        step, expected = await environment.step(move), await sound.step(move)
        assert (step.rewards, step.current) == (expected.rewards, expected.current)
    await environment.close()


@pytest.mark.parametrize(
    ("what", "when"),
    [
        ("raise", "init"),
        ("die", "reset"),
        ("hang", "reset"),
        pytest.param("hang", "init", marks=pytest.mark.slow),  # concurrent starts take long
    ],
)
async def test_a_beginning_is_tried_again_on_a_fresh_process(
    tmp_path: Path, what: str, when: str
) -> None:
    limits = FaultLimits(
        start_seconds=PATIENCE, reset_seconds=PATIENCE, retries=2, backoff_seconds=0.01
    )
    if what == "hang":  # a start has to import the interpreter's world first
        limits = replace(
            limits, **{"start_seconds": 3} if when == "init" else {"reset_seconds": 0.3}
        )
    environment = naughty(what, when, limits, once=str(tmp_path / "once"))
    before = counts()
    reset = await environment.reset(0)
    assert reset.current == ("left",)
    assert gained(before) == {
        "resets": 1,
        "retries": 1,
        "faults": 1,
        **({"kills": 1} if what == "hang" else {}),
    }
    await environment.close()


async def test_a_beginning_that_always_fails_says_how_often_it_was_tried() -> None:
    environment = naughty("raise", "reset")
    with pytest.raises(EnvironmentFault, match=r"a bug of its author.*\(tried 3 times\)") as caught:
        await environment.reset(0)
    assert "in _misbehave" in caught.value.traceback
    await environment.close()


async def test_a_failed_import_is_not_retried() -> None:
    environment = hosted("tests.workflow.environments.nowhere:Nim", limits=QUICK)
    before = counts()
    with pytest.raises(EntrypointError, match="does not exist here"):
        await environment.reset(0)
    assert gained(before) == {}
    await environment.close()


async def test_a_huge_observation_is_refused() -> None:
    environment = naughty("huge", "never")
    with pytest.raises(ObservationTooLargeError):
        await environment.reset(0)
    await environment.close()


@pytest.mark.parametrize("what", ["raise", "exit"])
async def test_in_this_process_too_it_cannot_end_more_than_its_episode(what: str) -> None:
    environment = Local(lambda: Naughty(what, "step"), name="naughty")
    await environment.reset(0)
    with pytest.raises(EnvironmentFault, match="naughty raised"):
        await environment.step({"left": 1})
    await environment.close()


async def test_an_invalid_step_is_reported_from_another_process() -> None:
    environment = naughty("nothing", "step", QUICK)
    await environment.reset(0)
    with pytest.raises(EnvironmentContractError, match="step is None") as caught:
        await environment.step({"left": 1})
    assert caught.value.field == "step"
    await environment.close()


async def test_in_this_process_a_fault_is_typed_and_a_beginning_is_repeated() -> None:
    made: list[Nim] = []

    def make() -> Nim:
        if not made:
            made.append(Nim())
            raise OSError("no licence is free")
        return Nim()

    environment = Local(make, name="nim", limits=QUICK)
    before = counts()
    await environment.reset(3)
    assert gained(before) == {"resets": 1, "retries": 1, "faults": 1}
    await environment.close()
    await environment.close()
