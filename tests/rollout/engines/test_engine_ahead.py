"""Weights that an engine has loaded before their commit, in any order of events: what they compute
gets out only as the committed version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.rollout.engines.base import ServingEngine, Tensors
from services.rollout.engines.errors import EngineStale, UpdateFailed
from services.rollout.engines.requests import (
    EngineResponse,
    LoadedAhead,
    Memory,
    UpdateWave,
)
from services.rollout.engines.turns import EngineTurn
from tests.support.waiting import PATIENCE
from troupe.rpc import TroupeError
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling

UPDATING, HEALTHY = common_pb.ENGINE_STATE_UPDATING, common_pb.ENGINE_STATE_HEALTHY
STALE = common_pb.ENGINE_STATE_STALE


class OneTokenEngine(ServingEngine):
    """Draws one token per turn: a number that belongs to the weights in its memory."""

    kind: ClassVar[str] = "one-token"

    def __init__(self) -> None:
        super().__init__("e0", "p")
        # What its memory holds: a checksum, or a step result.
        self.memory = ""
        self.faults: set[str] = set()

    def loads_ahead(self, ref: common_pb.WeightsRef) -> bool:
        return self.state == HEALTHY and self.version == ref.version - 1

    @property
    def _num_bytes(self) -> int:
        return 0

    async def _apply_ahead(
        self, ref: common_pb.WeightsRef, starting: Callable[[], None]
    ) -> LoadedAhead | None:
        if "gone" in self.faults:
            return None
        starting()
        self.memory = "part"
        await asyncio.sleep(0)
        if "load" in self.faults:
            raise UpdateFailed("broken", field="weights", value="", remedy="none")
        self.memory = ref.trained_on.step_result
        return LoadedAhead(None, 0.1)

    async def _verify_ahead(self, ref: common_pb.WeightsRef, loaded: LoadedAhead) -> None:
        await asyncio.sleep(0)
        # Weights of two attempts may be so near that no proof tells them apart.
        if "proof" in self.faults:
            raise UpdateFailed("not proven", field="weights", value="", remedy="none")

    async def _apply(self, tensors: Tensors, ref: common_pb.WeightsRef) -> float:
        self.memory = ref.trained_on.step_result
        return 0.0

    async def _serve(self, turn: EngineTurn) -> EngineResponse:
        future = asyncio.get_running_loop().create_future()
        self._waiting[turn.request_id] = future
        drawn = self.memory
        task = asyncio.create_task(self._answer(turn, future, drawn))
        try:
            return await future
        finally:
            task.cancel()
            del self._waiting[turn.request_id]

    async def _answer(self, turn: EngineTurn, future: asyncio.Future[Any], drawn: str) -> None:
        await self._settled.wait()
        if not future.done():
            assert self.version is not None
            turn.extend([number_of(drawn)], [0.0], [self.version])
            future.set_result(turn.result())

    def _fail_turns(self, error: Exception) -> None:
        for turn, future in self._unanswered():
            turn.closed = True
            future.set_exception(error)

    def _drop(self, turn: EngineTurn) -> None:
        turn.closed = True

    def _read(self, ref: common_pb.WeightsRef, transfer: Transfer) -> Any:
        return {}, None

    async def _fits(self, tensors: Tensors, ref: common_pb.WeightsRef) -> None:
        return

    async def _begin(self) -> None:
        self.memory = ""

    async def _score(self, asked: Any, temperature: float) -> Any:
        return [[float(number_of(self.memory))] for _ in asked], self._life.version or 0

    async def stop(self) -> None:
        self._life.stopped()
        self._fail_turns(EngineStale(self.engine_id, "STOPPED"))
        self.give_up_ahead("it was stopped")

    async def check(self) -> common_pb.EngineState.ValueType:
        return self.state

    async def abort(self, request_id: str) -> None:
        return

    async def _release(self, tags: frozenset[Memory]) -> None:
        self.memory = ""

    async def _resume(self, tags: frozenset[Memory]) -> None:
        return


def number_of(result: str) -> int:
    """`r3.1` -> 31."""
    return int(result[1:].replace(".", ""))


def weights(version: int, attempt: int, *, committed: bool) -> common_pb.WeightsRef:
    """Weights of the result `r{version}.{attempt}`."""
    ref = common_pb.WeightsRef(job_id="job", policy="p", version=version)
    ref.trained_on.step_result = f"r{version}.{attempt}"
    if committed:
        ref.key, ref.checksum = f"v{version}", ref.trained_on.step_result
    return ref


class Ahead(RuleBasedStateMachine):
    """One engine and a store, which commits versions in order, each by one of several attempts."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.committed = [0]  # by version: the attempt
        self.attempt = 0
        self.turns: list[asyncio.Task[EngineResponse]] = []

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(PATIENCE):
                try:
                    return await work
                except TroupeError:
                    return None

        return self.loop.run_until_complete(bounded())

    @property
    def newest(self) -> int:
        return len(self.committed) - 1

    def ref(self, version: int) -> common_pb.WeightsRef:
        return weights(version, self.committed[version], committed=True)

    @initialize()
    def start(self) -> None:
        self.engine = OneTokenEngine()
        self.wait(self.engine.start())
        self.update()

    @rule(fault=st.sampled_from(["", "", "", "gone", "load", "proof"]), asked=st.booleans())
    def load_ahead(self, fault: str, asked: bool) -> None:
        """A step is made (again), the engine told of it, and perhaps asked for a turn."""
        self.attempt += 1
        self.engine.faults = {fault}
        ref = weights(self.newest + 1, self.attempt, committed=False)
        before = self.engine.memory, self.engine.state
        loaded = self.wait(self.engine.load_ahead(ref, UpdateWave.of()))
        if loaded is False:
            assert (self.engine.memory, self.engine.state) == before
        assert self.engine.ahead == (bool(loaded) or before[1] == UPDATING)
        if asked:
            self.ask()

    @precondition(lambda self: self.attempt > 0)
    @rule(told=st.booleans(), again=st.booleans())
    def commit(self, told: bool, again: bool) -> None:
        """The newest attempt, or one more of which the engine hears nothing, is committed, and the
        orchestrator may learn of it."""
        self.committed.append(self.attempt + again)
        self.attempt = 0
        if told:
            self.update()

    @rule()
    def update(self) -> None:
        """The orchestrator names the committed version."""
        ref = self.ref(self.newest)
        if self.engine.awaits(ref):
            self.wait(self.engine.admit(ref))
        elif self.engine._life.alive and not self.engine.asleep:
            self.wait(self.engine.update_weights(ref, None))  # type: ignore[arg-type]
            assert self.engine.version == self.newest
        self.engine.faults = set()

    @precondition(lambda self: self.engine.ahead)
    @rule()
    def deadline(self) -> None:
        self.engine.give_up_ahead("no commit")
        assert (self.engine.state, self.engine.version) == (STALE, None)

    @rule()
    def ask(self) -> None:
        name = f"t{len(self.turns)}"
        turn = self.engine.generate(
            name, [1], Sampling(max_new_tokens=1, seed=1), deadline_seconds=PATIENCE
        )
        self.turns.append(self.loop.create_task(turn))
        self.wait(asyncio.sleep(0.001))

    @rule()
    def sleep(self) -> None:
        self.wait(self.engine.sleep(drain_seconds=0))
        self.wait(self.engine.wake())
        self.update()

    @rule()
    def die(self) -> None:
        self.engine._die("killed")
        self.wait(self.engine.start())
        self.update()

    @invariant()
    def only_committed_weights_get_out(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.wait(asyncio.sleep(0.001))
        # The serving weights are those committed under their version.
        version = self.engine.version
        if self.engine.state == HEALTHY and version is not None:
            assert self.engine.memory == f"r{version}.{self.committed[version]}"
        for turn in self.turns:
            if turn.done() and turn.exception() is None:
                response = turn.result()
                for token, span in zip(response.token_ids, response.versions, strict=True):
                    number = f"{span.version}{self.committed[span.version]}"
                    assert token == int(number)
        # Turns wait for nothing but a commit.
        if not self.engine.ahead:
            assert all(turn.done() for turn in self.turns)

    def teardown(self) -> None:
        self.wait(self.engine.stop())
        for turn in self.turns:
            turn.cancel()
        self.wait(asyncio.sleep(0.001))
        self.loop.close()


TestAhead = Ahead.TestCase
TestAhead.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


async def test_the_deadline_fits_the_bytes_that_are_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A version of 65 GB waits for three minutes, a tiny one for one."""
    waited: list[float] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def noted(seconds: float, *arguments: Any) -> asyncio.TimerHandle:
        waited.append(seconds)
        return call_later(seconds, *arguments)

    for size, expected in ((65_000_000_000, 190.0), (0, 60.0)):
        engine = OneTokenEngine()
        await engine.start()
        await engine.update_weights(weights(0, 0, committed=True), None)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(OneTokenEngine, "_num_bytes", size)
            patch.setattr(loop, "call_later", noted)
            assert await engine.load_ahead(weights(1, 1, committed=False), UpdateWave.of())
        assert waited.pop() == expected
        assert engine.message == "version 1 is loaded and waits for its commit"
        await engine.stop()
        assert not engine.ahead
