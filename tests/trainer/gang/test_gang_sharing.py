"""A gang that several policies and threads share, and its remains when it cannot continue."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.trainer.gang.gang import Gangs
from services.trainer.settings import TrainerSettings
from tests.trainer.gang.test_gang import assert_equal, gang_spec, rows_of, together
from tests.trainer.gang.test_gang_steps import (
    assert_close,
    copied,
    gang_of,
    gone,
    ranks,
    step,
    violations,
)
from tests.trainer.stage import TrainingStage, fill_up
from troupe.job import JobSpec
from troupe.rpc import Aborted, FailedPrecondition, NotFound, ResourceExhausted

slow = pytest.mark.slow
# Several passes of a gang on busy cores, where one may take a minute.
_PASSES_SECONDS = 400


@pytest.fixture
def gangs() -> Iterator[Gangs]:
    some = Gangs(TrainerSettings(trainer_device="cpu", gang_ranks=2, gang_timeout_seconds=60))
    yield some
    some.give_up()  # a thread of a failed test may still wait for an answer
    some.close()


def another(gangs: Gangs, spec: JobSpec) -> Any:
    from services.trainer.gang.learner import GangLearner

    return GangLearner(gangs, "job/other", spec, "solver", {"double": True})


def many(spec: JobSpec, times: int) -> list[Any]:
    """Return rows that take the ranks seconds."""
    rows = rows_of(spec, 20, 0)
    return [replace(row, sample_id=f"s{i}") for i, row in enumerate(rows * times)]


@slow
@pytest.mark.timeout(2 * _PASSES_SECONDS + 100)
def test_a_policy_leaves_and_comes_back_while_another_computes(
    tokenizer: Path, gangs: Gangs
) -> None:
    """As in a worker: passes in one thread, suspensions in others."""
    spec = gang_spec(tokenizer)
    busy, guest = together(gangs, spec), another(gangs, spec)
    weights, rows = guest.weights(), many(spec, 8)
    problems: list[BaseException] = []
    ended = threading.Event()

    def compute() -> None:
        try:
            while not ended.is_set():
                busy.accumulate(rows)
                assert busy.apply(0).metrics["samples"] == len(rows)
        except BaseException as problem:
            problems.append(problem)

    def come_and_go() -> None:
        try:
            for _ in range(3):
                tensors, values = guest.suspended()
                guest.release()
                guest.adopt(tensors, values)
            assert_equal(guest.weights(), weights)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=call, daemon=True) for call in (compute, come_and_go)]
    for thread in threads:
        thread.start()
    # Until it has been bound three times, each time after passes of the other policy.
    threads[1].join(_PASSES_SECONDS)
    ended.set()
    threads[0].join(_PASSES_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "somebody took another's answer"
    assert problems == []


@slow
def test_a_rank_that_hangs_does_not_delay_a_caller_that_gives_up(
    tokenizer: Path, gangs: Gangs
) -> None:
    spec = gang_spec(tokenizer)
    gang = together(gangs, spec)
    children = gang_of(os.getpid())
    (first,) = [rank for rank in ranks(os.getpid()) if rank.environ()["RANK"] == "0"]
    rows = many(spec, 500)  # more than fits into the socket
    first.send_signal(signal.SIGSTOP)
    threading.Timer(2, gangs.give_up).start()
    began = time.monotonic()
    with pytest.raises(Aborted) as lost:
        gang.accumulate(rows)
    assert lost.value.kind == "gang_lost"
    assert time.monotonic() - began < 55  # not after the ranks' own timeout of 60 s
    asyncio.run(gone(children))


@slow
def test_a_full_memory_disk_is_named_and_the_gang_goes_on(
    tokenizer: Path, gangs: Gangs, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = gang_spec(tokenizer)
    gang = together(gangs, spec)
    weights, moments = gang.weights(), gang.moments()
    gang.accumulate(rows_of(spec, 6, 0))
    monkeypatch.setattr(gang._gang, "directory", small_disk)
    ballast = fill_up(small_disk, 8192)
    with pytest.raises(ResourceExhausted) as caught:
        gang.published()
    assert caught.value.kind == "storage_full"
    assert caught.value.value == str(small_disk)
    assert caught.value.remedy
    assert os.listdir(small_disk) == ["ballast"]
    ballast.unlink()
    assert not gang.lost
    assert gang.apply(0).metrics["samples"] == 6
    gang.restore(weights, moments)
    assert_equal(gang.weights(), weights)


@slow
def test_a_full_transfer_directory_is_named_by_all_ranks_and_the_gang_goes_on(
    tokenizer: Path, small_disk: Path
) -> None:
    settings = {"trainer_device": "cpu", "gang_ranks": 2, "gang_timeout_seconds": 60}
    gangs = Gangs(TrainerSettings(**settings, transfer_dir=small_disk / "transfer"))
    spec = gang_spec(tokenizer)
    try:
        gang = together(gangs, spec)
        weights, moments = gang.weights(), gang.moments()
        gang.accumulate(rows_of(spec, 6, 0))
        ballast = fill_up(small_disk, 8192)
        for call in (gang.suspended, lambda: gang.restore(weights, moments)):
            with pytest.raises(ResourceExhausted) as caught:
                call()
            assert caught.value.kind == "storage_full"
            assert caught.value.remedy
        assert gangs.transfer.keys() == []
        ballast.unlink()
        assert not gang.lost
        assert gang.apply(0).metrics["samples"] == 6
        gang.restore(weights, moments)
        assert_equal(gang.weights(), weights)
        assert gangs.transfer.keys() == []
    finally:
        gangs.close()


def test_an_invalid_endpoint_is_named_and_leaves_nothing(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("troupe.disks.memory_root", lambda: tmp_path)
    for endpoint in ("no-such-host.invalid:0", "127.0.0.1", "127.0.0.1:http"):
        gangs = Gangs(TrainerSettings(gang_ranks=2, gang_endpoint=endpoint))
        with pytest.raises(FailedPrecondition) as refused:
            together(gangs, gang_spec(tokenizer))
        assert refused.value.kind == "gang_endpoint_unusable"
        assert (refused.value.field, refused.value.value) == ("gang_endpoint", endpoint)
        assert refused.value.remedy
        gangs.close()
    assert list(tmp_path.glob("troupe-gang-*")) == []


@slow
async def test_ranks_that_no_policy_needs_make_room_for_others(stage: TrainingStage) -> None:
    """Regardless of the policy for which they were started."""
    two, three = (gang_spec(stage.tokenizer, size) for size in (2, 3))
    trainer = await stage.trainer(gang_ranks=3)
    with pytest.raises(FailedPrecondition) as refused:
        await trainer.bind(two, version=7)
    assert refused.value.kind == "state_not_found"
    assert len(ranks(os.getpid())) == 2
    await trainer.bind(three)
    assert len(ranks(os.getpid())) == 3
    await trainer.bind(two)  # another specification, without a release of the policy
    assert len(ranks(os.getpid())) == 2
    state = await trainer.suspend()
    stage.transfer.delete(state.key)
    await trainer.release()
    with pytest.raises(NotFound) as gone_state:
        await trainer.resume(two, state)
    assert gone_state.value.kind == "suspended_state_gone"
    await trainer.bind(three)
    assert len(ranks(os.getpid())) == 3


@slow
async def test_a_policy_whose_ranks_have_died_does_not_keep_its_device(
    stage: TrainingStage,
) -> None:
    """A suspension notices it: nothing is left to suspend, and the step begins again elsewhere."""
    optimizer = {"lr": 1e-3, "eps": 1e-3}
    two, one = (gang_spec(stage.tokenizer, size, optimizer=optimizer) for size in (2, 1))
    job, alone = await stage.sibling()
    await alone.bind(one)
    _, expected = await step(job, alone, 0, one)
    gang, single = await stage.trainer(gang_ranks=2), await stage.trainer(worker_id="single")
    await gang.bind(two)
    await stage.open()
    rollouts = stage.rollouts(stage.first_model(two))
    for query, trajectory, samples in rollouts[:4]:
        await stage.append(query, trajectory, samples)
    running = asyncio.create_task(gang.run(0, 0))
    await gang.trained(4)
    children = gang_of(os.getpid())
    ranks(os.getpid())[1].send_signal(signal.SIGKILL)
    with pytest.raises(Aborted) as lost:
        await gang.suspend()
    assert lost.value.kind == "gang_lost"
    await asyncio.gather(running, return_exceptions=True)
    assert await gang.statuses() == []
    await gone(children)
    with pytest.raises(NotFound) as unbound:
        await gang.suspend()
    assert unbound.value.kind == "not_bound"
    for query, trajectory, samples in rollouts[4:]:
        await stage.append(query, trajectory, samples)
    await single.bind(one)
    commit = await single.run(0, 0)
    assert (commit.num_samples, commit.metrics["samples"]) == (8, 8)
    assert_close(copied(stage, commit.weights), expected)
    assert await violations(stage) == []
