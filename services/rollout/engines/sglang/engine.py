"""The engine that is an SGLang server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from services.rollout.engines.base import EngineLoad, Generation
from services.rollout.engines.errors import (
    BadTurn,
    EngineDied,
    EngineStartFailed,
    ReplyBroken,
    UpdateFailed,
)
from services.rollout.engines.front import EngineFront, Tensors
from services.rollout.engines.sglang.client import BrokenReply, Refused, ServerGone
from services.rollout.engines.sglang.loading import Updates
from services.rollout.engines.sglang.replies import parse, sampling_of
from services.rollout.engines.sglang.server import Server
from services.rollout.engines.turns import Turn
from services.rollout.engines.weights import check_fit, untied
from troupe.job import PolicySpec
from troupe.v1 import common_pb2 as pb

log = logging.getLogger(__name__)

MISSES_UNTIL_DEAD: Final = 3
# How long an aborted turn waits for the server to hand over what it has.
_ABORT_SECONDS: Final = 2.0


class SglangEngine(EngineFront):
    """Serves a policy with one SGLang server over HTTP.

    `replica` chooses the URL of an attached server. `work_dir` holds a launched server's log and
    the weights on their way; the server must see it. `updates`: through files (in shared memory
    by default) or through handles of shared memory. `deterministic`: the server is launched so that
    a turn is a function of (weights, prompt, seed); an attached one must have been.
    """

    kind: ClassVar[str] = "sglang"

    def __init__(
        self,
        engine_id: str,
        policy: str,
        spec: PolicySpec,
        *,
        replica: int = 0,
        work_dir: Path | None = None,
        updates: Updates = "disk",
        deterministic: bool = False,
    ) -> None:
        super().__init__(engine_id, policy)
        self._spec = spec
        self._server = Server(
            policy,
            spec,
            replica=replica,
            work_dir=work_dir,
            updates=updates,
            deterministic=deterministic,
        )
        self._waiting: dict[str, asyncio.Future[Generation]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._aborting: set[str] = set()
        # Clear while the server must not be given turns.
        self._open = asyncio.Event()
        self._open.set()
        # The version that the server held when the gate was opened last, verified or not.
        self._loaded: int | None = None
        self._updates = 0
        self._misses = 0
        self._queued = 0
        self._finished_since_check = 0

    async def start(self) -> None:
        """Launch or attach, within `start_timeout_seconds`; STALE afterwards.

        Does nothing on an engine that is alive. Raises `EngineStartFailed`, and `EngineDied`
        after `stop`.
        """
        async with self._changing:
            if self._life.alive:
                return
            if self.state == pb.ENGINE_STATE_STOPPED:
                raise EngineDied(self.engine_id, "it was stopped")
            try:
                await self._server.up()
            except EngineStartFailed as error:
                self._life.died(str(error))
                raise
            server = self._server
            self.max_context, self.vocabulary = server.max_context, server.vocabulary
            self.eos_ids = server.eos_ids
            self._misses = 0
            self._life.started()

    async def abort(self, request_id: str) -> None:
        """End a request early: its `generate` returns what it has."""
        turn, future = self._turns.get(request_id), self._waiting.get(request_id)
        if turn is None or future is None or future.done():
            return
        self._aborting.add(request_id)
        with contextlib.suppress(ServerGone, BrokenReply, Refused):
            await self._server.client.abort(_rid(turn))
        # A paused server, or one that has not seen the request yet, hands over nothing.
        await asyncio.wait([future], timeout=_ABORT_SECONDS)
        if not future.done():
            self._drop(turn)
            future.set_result(turn.result(aborted=True))

    def load(self) -> EngineLoad:
        """Current load; which turns wait in the server is known from the last `check`."""
        load = self._turns.load()
        waiting = min(self._queued, load.running)
        return EngineLoad(
            load.running - waiting,
            load.waiting + waiting,
            load.outstanding_tokens,
            load.generated_tokens,
            load.tokens_per_second,
        )

    async def check(self) -> pb.EngineState.ValueType:
        """Whether the server generates. Answered turns count; else it is asked for a token."""
        if not self._life.alive or self.state == pb.ENGINE_STATE_UPDATING:
            return self.state
        if self._server.exited is not None:
            self._die(self._server.exited)
            return self.state
        answered, self._finished_since_check = self._finished_since_check, 0
        client = self._server.client
        well = answered > 0 or await client.healthy()
        # An update may have begun meanwhile: a paused server does not generate.
        if not self._life.alive or self.state == pb.ENGINE_STATE_UPDATING:
            return self.state
        if well:
            self._misses = 0
            with contextlib.suppress(ServerGone, BrokenReply, Refused):
                self._queued = await self._server.waiting()
            if self.state == pb.ENGINE_STATE_SUSPECT:
                self._life.recovered()
        else:
            self._misses += 1
            if self._misses >= MISSES_UNTIL_DEAD or not await client.alive():
                self._die(f"{client.url} generates nothing")
            elif self.state == pb.ENGINE_STATE_HEALTHY:
                self._life.suspect(f"{client.url} missed a probe")
        return self.state

    async def stop(self) -> None:
        """End turns as aborted, then a launched server. An attached one goes on running."""
        self._life.stopped()
        for turn in self._turns:
            future = self._waiting.get(turn.request_id)
            if future is not None and not future.done():
                self._drop(turn)
                future.set_result(turn.result(aborted=True))
        if self._background:
            await asyncio.wait(self._background, timeout=_ABORT_SECONDS)
        await self._server.down(for_good=True)

    async def _serve(self, turn: Turn) -> Generation:
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting[turn.request_id] = future
        self._tasks[turn.request_id] = asyncio.create_task(self._run(turn, future))
        try:
            return await future
        finally:
            del self._waiting[turn.request_id]
            self._aborting.discard(turn.request_id)
            self._tasks.pop(turn.request_id).cancel()

    def _drop(self, turn: Turn) -> None:
        turn.closed = True
        task = self._tasks.get(turn.request_id)
        if task is not None:
            task.cancel()
        # The server would notice the broken connection only when it has something to send.
        cleanup = asyncio.create_task(self._forget(_rid(turn)))
        self._background.add(cleanup)
        cleanup.add_done_callback(self._background.discard)

    async def _forget(self, rid: str) -> None:
        with contextlib.suppress(ServerGone, BrokenReply, Refused):
            await self._server.client.abort(rid)

    def _fail_turns(self, error: Exception) -> None:
        for turn in self._turns:
            future = self._waiting.get(turn.request_id)
            if future is not None and not future.done():
                self._drop(turn)
                future.set_exception(error)

    async def _fits(self, tensors: Tensors, ref: pb.WeightsRef) -> None:
        check_fit(tensors, self._server.layout, ref.key)

    async def _apply(self, tensors: Tensors, ref: pb.WeightsRef) -> float:
        changed = bool(self.checksum) and self.checksum != ref.checksum
        self._updates += 1
        try:
            return await self._server.updater.run(
                untied(tensors, self._server.layout),
                ref,
                changed=changed,
                gate=partial(self._gate, ref.version),
            )
        except ServerGone as error:
            await self._lost(error)
            raise UpdateFailed(
                str(error), field="engine", value=self.engine_id, remedy="Restart the engine."
            ) from error
        except BrokenReply as error:
            raise UpdateFailed(
                str(error), field="engine", value=self.engine_id, remedy="Repeat the update."
            ) from error

    def _gate(self, version: int, is_open: bool) -> None:
        if is_open:
            self._loaded = version
            self._open.set()
        else:
            self._open.clear()

    async def _run(self, turn: Turn, future: asyncio.Future[Generation]) -> None:
        outcome: Generation | Exception
        try:
            outcome = await self._converse(turn)
        except ServerGone as error:
            outcome = await self._lost(error) or self._broken(turn, error)
        except BrokenReply as error:
            outcome = self._broken(turn, error)
        except Refused as error:
            outcome = self._refused(turn, error)
        if future.done():
            return
        turn.closed = True
        self._finished_since_check += 1
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    async def _converse(self, turn: Turn) -> Generation:
        """Ask until the response is complete: an update may make that more than once."""
        while True:
            await self._open.wait()
            asked_of, updates = self._loaded, self._updates
            turn.started_at = turn.started_at or time.monotonic()
            prompt = turn.prompt_ids + turn.token_ids
            meta = await self._server.client.generate(_rid(turn), prompt, sampling_of(turn))
            # Tokens of weights that are not verified yet must not get out.
            await self._settled.wait()
            reply = parse(meta, asked_of, steady=updates == self._updates)
            if reply.versions is None:
                turn.restart()
                continue
            if not turn.versions:
                turn.read_tokens = len(turn.prompt_ids) - reply.cached_tokens
            for row in zip(reply.token_ids, reply.logprobs, reply.versions, strict=True):
                turn.append(*row)
            self._turns.drew(len(reply.token_ids))
            aborted = reply.reason == "abort"
            if not aborted or turn.request_id in self._aborting:
                return turn.result(aborted=aborted)
            if turn.remaining == 0:
                return turn.result()
            if updates == self._updates:
                raise BrokenReply(f"the server aborted it: {reply.message or 'no reason given'}")
            turn.incarnation += 1

    async def _lost(self, error: Exception) -> EngineDied | None:
        """The connection broke: is the server gone, or only this answer?"""
        if self._server.exited is None and await self._server.client.alive():
            return None
        self._die(self._server.exited or str(error))
        return EngineDied(self.engine_id, self.message or str(error))

    def _broken(self, turn: Turn, error: Exception) -> ReplyBroken:
        return ReplyBroken(self.engine_id, turn.request_id, str(error))

    def _refused(self, turn: Turn, error: Refused) -> Exception:
        if error.status >= 500:
            return self._broken(turn, error)
        return BadTurn(
            f"engine {self.engine_id} refused the turn: {error.message}",
            field="request_id",
            value=turn.request_id,
            remedy="See the server's message; its limits are in its log.",
        )


def _rid(turn: Turn) -> str:
    return f"{turn.request_id}#{turn.incarnation}"
