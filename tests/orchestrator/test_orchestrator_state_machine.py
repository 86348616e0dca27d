"""The life of a job under anything that users and crashes do to it, in any order."""

from __future__ import annotations

import asyncio
import itertools
import logging
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.cluster import ENDED, Cluster, job_yaml
from tests.support.waiting import PATIENCE
from troupe import states
from troupe.rpc import FailedPrecondition
from troupe.v1 import common_pb2 as common_pb

T = TypeVar("T")
POLICIES = ("checker", "solver")
STEPS = 3
QUIET = (*ENDED, common_pb.JOB_STATE_PAUSED)
# The same request may be repeated; the next states follow the table.
RESUMABLE = (common_pb.JOB_STATE_PAUSED, common_pb.JOB_STATE_FAILED, common_pb.JOB_STATE_CANCELLED)


class JobLife(RuleBasedStateMachine):
    """Acts on one job; at the end lets it finish and audits it."""

    def __init__(self, redis_url: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._directory = tempfile.TemporaryDirectory()
        self._cluster = Cluster(redis_url, Path(self._directory.name))
        self._job_id = ""

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, PATIENCE))

    @initialize(
        mode=st.sampled_from(["serial", "sync", "micro_batch", "async"]),
        rollout=st.sampled_from([0.0, 0.02]),
        trainer=st.sampled_from([0.0, 0.02]),
        spare=st.sampled_from([0, 1]),
        redundant=st.sampled_from([0, 2]),
    )
    def start(self, mode: str, rollout: float, trainer: float, spare: int, redundant: int) -> None:
        async def start() -> None:
            await self._cluster.open()
            (await self._cluster.add_rollout()).script.seconds = rollout
            (await self._cluster.add_trainer()).script.seconds = trainer
            text = job_yaml(
                pipeline__mode=mode,
                pipeline__steps=STEPS,
                pipeline__over_sampling=spare,
                pipeline__redundant_trajectories=redundant,
                evaluation__queries=1,
            )
            self._job_id = await self._cluster.submit(text)

        self._do(start())

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.03, 0.1]))
    def let_it_run(self, seconds: float) -> None:
        self._do(asyncio.sleep(seconds))

    @rule()
    def pause(self) -> None:
        self._ask(self._cluster.pause)

    @rule()
    def resume(self) -> None:
        self._ask(self._cluster.resume)

    @rule()
    def cancel(self) -> None:
        self._ask(self._cluster.cancel)

    @rule()
    def crash_the_orchestrator(self) -> None:
        async def restart() -> None:
            await self._cluster.stop_orchestrator()
            await self._cluster.start_orchestrator()

        self._do(restart())

    @rule()
    def crash_the_store(self) -> None:
        async def restart() -> None:
            await self._cluster.stop_store()
            await self._cluster.start_store()

        self._do(restart())

    @precondition(lambda self: self._cluster.rollouts)
    @rule()
    def crash_the_rollout_worker(self) -> None:
        async def restart() -> None:
            old = self._cluster.rollouts.pop()
            await old.down()
            await self._cluster.add_rollout(old.script, port=old.settings.port)

        self._do(restart())

    @precondition(lambda self: self._cluster.trainers)
    @rule()
    def crash_the_trainer(self) -> None:
        async def restart() -> None:
            old = self._cluster.trainers.pop()
            await old.down()
            await self._cluster.add_trainer(old.script, port=old.settings.port)

        self._do(restart())

    def _ask(self, call: Callable[[str], Awaitable[Any]]) -> None:
        async def ask() -> None:
            with suppress(FailedPrecondition):  # the table forbids it now
                await call(self._job_id)

        self._do(ask())

    async def _finish(self) -> None:
        """After all calls, the job can be completed without losses."""
        cluster, job_id = self._cluster, self._job_id
        job = await cluster.wait(job_id, QUIET)
        if job.state in RESUMABLE:
            assert job.state != common_pb.JOB_STATE_FAILED, job.problem
            await cluster.resume(job_id)
            job = await cluster.wait(job_id)
        assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
        assert job.step == STEPS
        await cluster.check_accounts(job_id, STEPS, POLICIES)
        events = await cluster.events(job_id)
        moves = [event.state.state for event in events if event.HasField("state")]
        assert moves[0] == common_pb.JOB_STATE_SUBMITTED
        for source, target in itertools.pairwise(moves):
            states.check(states.JOB, source, target)
        steps = [event.metrics.step for event in events if event.HasField("metrics")]
        assert steps == [0, 1, 2, 3, 3], "every step and evaluation is logged once"

    def teardown(self) -> None:
        try:
            if self._job_id:
                self._do(self._finish())
        finally:
            self._do(self._cluster.close())
            self._directory.cleanup()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One event loop for all examples: gRPC keeps to the first that it sees."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    asyncio.set_event_loop(None)
    loop.close()


@pytest.mark.parametrize(
    ("examples", "steps"), [(4, 8), pytest.param(24, 10, marks=pytest.mark.slow)]
)
def test_no_order_of_events_loses_a_job_s_state(
    empty_redis: str,
    loop: asyncio.AbstractEventLoop,
    caplog: pytest.LogCaptureFixture,
    examples: int,
    steps: int,
) -> None:
    caplog.set_level(logging.CRITICAL)
    run_state_machine_as_test(
        lambda: JobLife(empty_redis, loop),  # type: ignore[arg-type]
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
