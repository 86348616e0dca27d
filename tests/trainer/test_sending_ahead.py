"""Servers load a step's weights while these are published, and serve them after their commit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engines import base
from services.rollout.engines.errors import EngineStale
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.serving.policy import ServedPolicy
from services.trainer.publication import Publication
from services.trainer.state.training_state import Frontier
from services.trainer.versions import Versions
from tests.rollout.engines.asking import ask
from tests.support.interpreters import sglang_double
from tests.support.waiting import PATIENCE, until
from tests.trainer.stage import Trainer, TrainingStage
from tests.trainer.test_proofs import served_by
from tests.trainer.test_sending import python as python  # a fixture
from tests.trainer.test_sending import trained
from tests.trainer.test_sending_waves import CPU, reports, serving
from tests.trainer.test_sending_waves import made as made  # a fixture
from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition, TroupeError, new_id
from troupe.transfer import StorageFull
from troupe.transfer.flat_buckets import flat_buckets
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import trainer_pb2 as trainer_pb

HEALTHY, UPDATING = common_pb.ENGINE_STATE_HEALTHY, common_pb.ENGINE_STATE_UPDATING
IDS = [3, 1, 4, 1, 5]


class Publishing:
    """The publication of trained versions, which waits for a test."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.fails = False
        self.begun = 0

    def wait(self) -> None:
        self.begun += 1
        assert self.goes_on.wait(PATIENCE)
        if self.fails:
            self.fails = False
            raise StorageFull("no room", key="weights@1")


@pytest.fixture
def publishing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publishing]:
    held, publish = Publishing(), Publication.publish

    def waits(self: Publication, version: int, *arguments: Any) -> common_pb.WeightsRef:
        if version:
            held.wait()
        return publish(self, version, *arguments)

    monkeypatch.setattr(Publication, "publish", waits)
    yield held
    held.goes_on.set()


async def stepped(
    stage: TrainingStage, trainer: Trainer, spec: JobSpec, step: int = 0
) -> tuple[common_pb.WeightsRef, asyncio.Task[common_pb.WeightsRef]]:
    """Train a step; return its weights as they are announced, and as they will be committed."""
    await stage.open(step, version=step)
    await stage.play(stage.first_model(spec), step=step, version=step)
    return await run_step(stage, trainer, step)


async def run_step(
    stage: TrainingStage, trainer: Trainer, step: int
) -> tuple[common_pb.WeightsRef, asyncio.Task[common_pb.WeightsRef]]:
    request = trainer_pb.RunStepRequest(
        request_id=new_id(), job_id=stage.job_id, policy="solver", step=step, version=step
    )
    stream = aiter(trainer.stub.RunStep(request, timeout=PATIENCE))

    async def committed() -> common_pb.WeightsRef:
        async for event in stream:
            if event.HasField("commit"):
                weights: common_pb.WeightsRef = event.commit.weights
                return weights
        raise AssertionError("no commit")

    async for event in stream:
        if event.HasField("stepped"):
            return event.stepped, asyncio.create_task(committed())
    raise AssertionError("nothing was announced")


@contextlib.asynccontextmanager
async def one_engine(
    stage: TrainingStage, spec: JobSpec, first: common_pb.WeightsRef, python: str
) -> AsyncIterator[tuple[ServedPolicy, SglangEngine]]:
    async with serving(stage, spec, first, python, [()]) as (policy, (engine,)):
        yield policy, engine


async def fails_without_tokens(turn: asyncio.Task[Any]) -> None:
    """Check that a turn of uncommitted weights is returned without its tokens."""
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(EngineStale) as failure:
            await turn
    assert failure.value.drawn is not None
    assert failure.value.drawn.token_ids == []


async def test_servers_load_during_the_publication_and_serve_after_the_commit(
    stage: TrainingStage,
    python: str,
    made: Counter[str],
    publishing: Publishing,
    request: pytest.FixtureRequest,
) -> None:
    count = 2 if "real" in request.node.name else 3
    spec, trainer = served_by(stage.spec(), "sglang"), await stage.trainer()
    first = await trainer.bind(spec)
    async with serving(stage, spec, first, python, [()] * count) as (policy, engines):
        announced, commit = await stepped(stage, trainer, spec)
        assert (announced.version, announced.key, announced.checksum) == (1, "", "")
        made.clear()
        assert await policy.load_ahead(announced) == count
        # All servers have everything before the publication has begun to copy.
        assert (publishing.goes_on.is_set(), commit.done()) == (False, False)
        assert [(one.state, one.version) for one in engines] == [(UPDATING, 0)] * count
        assert {one.message for one in engines} == {"version 1 is loaded and waits for its commit"}
        assert policy.serving == 0
        turn = asyncio.create_task(ask(engines[0], "early", IDS))
        await asyncio.sleep(0.3)  # time to answer in; none may before the commit, however long
        assert not turn.done()
        publishing.goes_on.set()
        ref = await commit
        assert ref.trained_on.step_result == announced.trained_on.step_result
        assert not turn.done()
        await policy.update(ref)
        assert reports(engines) == [(1, "broadcast", 0)] * count
        assert {one.checksum for one in engines} == {ref.checksum}
        answer = await turn
        assert {span.version for span in answer.versions} == {1}
        # It was sent once, and each bucket made once.
        published = stage.weights(ref)
        assert (made["rounds"], made["servers"]) == (1, count)
        assert made["tensors"] == len(published)
        assert made["bytes"] == sum(tensor.nbytes for tensor in published.values())
        # The next version is sent after its commit, in the same group.
        made.clear()
        await policy.update(await trained(stage, trainer, spec, 1))
        assert reports(engines) == [(2, "broadcast", 0)] * count


async def test_a_step_that_is_not_committed_leaves_no_trace_in_the_engines(
    stage: TrainingStage, tmp_path: Path, publishing: Publishing
) -> None:
    """The publication fails. The orchestrator names the former version, and the step runs again."""
    spec, trainer = served_by(stage.spec(), "sglang"), await stage.trainer()
    first = await trainer.bind(spec)
    async with one_engine(stage, spec, first, sglang_double(tmp_path)) as (policy, engine):
        announced, commit = await stepped(stage, trainer, spec)
        assert await policy.load_ahead(announced) == 1
        turn = asyncio.create_task(ask(engine, "early", IDS))
        await asyncio.sleep(0.2)  # time to answer in; none may before the commit, however long
        publishing.fails = True
        publishing.goes_on.set()
        with pytest.raises(TroupeError):
            await commit
        await policy.update(first)
        await fails_without_tokens(turn)
        assert (engine.state, engine.version, engine.checksum) == (HEALTHY, 0, first.checksum)
        assert {span.version for span in (await ask(engine, "then", IDS)).versions} == {0}
        again, commit = await run_step(stage, trainer, 0)
        assert again.trained_on.step_result != announced.trained_on.step_result
        # Too late: its request is given up.
        assert await policy.load_ahead(announced) == 0
        ref = await commit
        await policy.update(ref)
        assert (engine.state, engine.version, engine.checksum) == (HEALTHY, 1, ref.checksum)


async def test_weights_of_an_earlier_attempt_are_not_taken_for_the_committed_ones(
    stage: TrainingStage, tmp_path: Path, publishing: Publishing
) -> None:
    """The orchestrator learns only of the commit of a second attempt."""
    spec, trainer = served_by(stage.spec(), "sglang"), await stage.trainer()
    first = await trainer.bind(spec)
    async with one_engine(stage, spec, first, sglang_double(tmp_path)) as (policy, engine):
        announced, commit = await stepped(stage, trainer, spec)
        assert await policy.load_ahead(announced) == 1
        turn = asyncio.create_task(ask(engine, "early", IDS))
        publishing.fails = True
        publishing.goes_on.set()
        with pytest.raises(TroupeError):
            await commit
        _, commit = await run_step(stage, trainer, 0)
        ref = await commit
        assert not engine.awaits(ref)
        await policy.update(ref)
        await fails_without_tokens(turn)
        assert (engine.state, engine.version, engine.checksum) == (HEALTHY, 1, ref.checksum)
        assert {span.version for span in (await ask(engine, "then", IDS)).versions} == {1}


async def test_an_engine_that_hears_of_no_commit_goes_back_by_itself(
    stage: TrainingStage,
    tmp_path: Path,
    publishing: Publishing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trainer, store or orchestrator was lost."""
    spec, trainer = served_by(stage.spec(), "sglang"), await stage.trainer()
    first = await trainer.bind(spec)
    monkeypatch.setattr(base, "COMMIT_SECONDS", 1.0)
    async with one_engine(stage, spec, first, sglang_double(tmp_path)) as (policy, engine):
        announced, commit = await stepped(stage, trainer, spec)
        assert await policy.load_ahead(announced) == 1
        turn = asyncio.create_task(ask(engine, "early", IDS))
        await fails_without_tokens(turn)
        await until(lambda: engine.state == HEALTHY)
        assert (engine.version, engine.checksum) == (0, first.checksum)
        assert {span.version for span in (await ask(engine, "then", IDS)).versions} == {0}
        # The commit was only late.
        publishing.goes_on.set()
        await policy.update(ref := await commit)
        assert (engine.version, engine.checksum) == (1, ref.checksum)


@pytest.mark.parametrize("fault", [pytest.param("dies", marks=pytest.mark.slow), "refuses"])
async def test_a_server_that_fails_before_the_commit_costs_no_version(
    stage: TrainingStage, tmp_path: Path, fault: str, publishing: Publishing, made: Counter[str]
) -> None:
    spec, trainer = served_by(stage.spec(), "sglang"), await stage.trainer()
    first = await trainer.bind(spec)
    buckets = len(list(flat_buckets(stage.weights(first).items(), 4096, CPU)))
    faulty = (f"--{fault}-after", str(buckets + 2))
    async with serving(stage, spec, first, sglang_double(tmp_path), [(), faulty]) as (
        policy,
        engines,
    ):
        announced, commit = await stepped(stage, trainer, spec)
        # Engines of its process group have a part of the weights, and go back, too.
        assert await policy.load_ahead(announced) == 0
        await until(lambda: policy.serving == 2)
        assert {one.version for one in engines} == {0}
        publishing.goes_on.set()
        await policy.update(await commit)
        await until(lambda: {one.version for one in engines} == {1})


@pytest.mark.slow
async def test_a_server_that_ends_while_it_waits_for_the_commit_is_restarted(
    stage: TrainingStage, tmp_path: Path, publishing: Publishing
) -> None:
    spec, trainer = served_by(stage.spec(), "sglang"), await stage.trainer()
    first = await trainer.bind(spec)
    async with one_engine(stage, spec, first, sglang_double(tmp_path)) as (policy, engine):
        announced, commit = await stepped(stage, trainer, spec)
        assert await policy.load_ahead(announced) == 1
        process = engine._server._process
        assert process is not None
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: engine.restarts == 1 and engine.state == HEALTHY)
        assert engine.version == 0
        publishing.goes_on.set()
        await policy.update(await commit)
        assert (engine.version, engine.restarts) == (1, 1)


async def test_a_trainer_that_is_gone_costs_no_version(
    stage: TrainingStage, tmp_path: Path, publishing: Publishing
) -> None:
    spec, trainer = served_by(stage.spec(), "sglang"), await stage.trainer()
    first = await trainer.bind(spec)
    async with one_engine(stage, spec, first, sglang_double(tmp_path)) as (policy, engine):
        announced, commit = await stepped(stage, trainer, spec)
        gone = common_pb.WeightsRef()
        gone.CopyFrom(announced)
        gone.trained_on.trainer = "127.0.0.1:1"
        assert await policy.load_ahead(gone) == 0
        assert (engine.state, engine.version) == (HEALTHY, 0)
        publishing.goes_on.set()
        await policy.update(await commit)
        assert reports([engine]) == [(1, "broadcast", 0)]


async def test_stepped_weights_stay_as_they_are_while_they_are_sent(stage: TrainingStage) -> None:
    spec, trainer = served_by(stage.spec(), "sglang"), await stage.trainer()
    await trainer.bind(spec)
    versions: Versions = trainer.worker.bindings.find((stage.job_id, "solver")).versions
    result = versions.stepped().trained_on.step_result
    ended: list[str] = []

    def give_up() -> None:
        versions.reset()
        ended.append("reset")

    with versions.uncommitted(result) as tensors:
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        thread = threading.Thread(target=give_up)
        thread.start()
        # The publication continues during that time.
        ref = versions.persist(Frontier(0, 1), keeping=True)
        assert ref.trained_on.step_result == result
        assert all(before[name].equal(tensor) for name, tensor in tensors.items())
        ended.append("sent")
    thread.join(PATIENCE)
    assert ended == ["sent", "reset"]
    with pytest.raises(FailedPrecondition) as refusal, versions.uncommitted(result):
        pass
    assert refusal.value.kind == "weights_moved_on"
