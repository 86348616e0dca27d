"""Moves of engines between the policies of one job.

An engine leaves its policy's router, is drained, is assigned to the other policy (or remade for
it), loads and verifies that policy's weights, and enters the other router. Exactly one policy lists
it at any time. After a failed move the engine returns to the first policy, whose keeper brings it
up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import structlog

from services.rollout.engines.base import ServingEngine
from services.rollout.serving.policy import ServedPolicy
from services.rollout.serving.supervision import EngineKeeper
from troupe.contracts import kinds
from troupe.job import JobSpec
from troupe.job.engines.sharing import shared_policies
from troupe.job.sections.balancing import exchange
from troupe.rpc.errors import FailedPrecondition, NotFound, Unavailable
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

log = structlog.get_logger(__name__)

# Updates that an arriving engine may need, because newer versions appear while it loads.
_UPDATES = 10

RemakeEngine = Callable[[str, str], ServingEngine]


class EngineMoves:
    """The executor of moves that the orchestrator decides (`troupe.scheduling.balancing`)."""

    def __init__(
        self, spec: JobSpec, policies: Mapping[str, ServedPolicy], remake: RemakeEngine
    ) -> None:
        """Create the executor. `remake(engine_id, policy)` remakes an engine for another policy,
        without starting it."""
        self._spec = spec
        self._policies = policies
        self._shared = shared_policies(spec)
        self._remake = remake
        self._running: dict[str, tuple[str, asyncio.Task[rollout_pb.MoveEngineResponse]]] = {}
        self._closed = False

    async def move(
        self, engine_id: str, target: ServedPolicy, *, drain_seconds: float | None = None
    ) -> rollout_pb.MoveEngineResponse:
        """Make the engine serve `target`; the response lacks the engine's status. No effect if it
        already serves `target` or is on its way.

        The move completes even when the caller is cancelled. Raises `NotFound`;
        `FailedPrecondition` of kind `engine_moving` (to another policy), `engine_not_movable`,
        `engine_not_serving` or `policy_at_minimum`; and the error of an engine that does not come
        up with `target`: then it is returned to its policy and brought up there.
        """
        if engine_id not in self._running:
            source = self._policy_of(engine_id)
            if source is target:
                return rollout_pb.MoveEngineResponse(source=source.name)
            self._check(engine_id, source, target)
            # No await from here to `part_with`: the checks still hold.
            engine = source.part_with(engine_id)
            seconds = self._spec.balancing.drain_seconds if drain_seconds is None else drain_seconds
            task = asyncio.create_task(
                self._run_move(engine, source, target, seconds), name=f"move-{engine_id}"
            )
            self._running[engine_id] = (target.name, task)
            task.add_done_callback(lambda _: self._running.pop(engine_id, None))
        going_to, task = self._running[engine_id]
        if going_to != target.name:
            raise FailedPrecondition(
                f"the engine is on its way to policy '{going_to}'",
                kind="engine_moving",
                field="engine_id",
                value=engine_id,
                remedy="Wait until it has arrived.",
            )
        return await asyncio.shield(task)

    async def settled(self) -> None:
        """Wait until no engine is on its way."""
        if tasks := [task for _, task in self._running.values()]:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Stop moving. Engines on their way stay listed with a policy, which stops them."""
        self._closed = True
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _policy_of(self, engine_id: str) -> ServedPolicy:
        for policy in self._policies.values():
            if policy.keeper(engine_id) is not None:
                return policy
        raise NotFound(
            "the job has no such engine here",
            kind="engine_not_found",
            field="engine_id",
            value=engine_id,
            remedy="ListEngines lists them.",
        )

    def _check(self, engine_id: str, source: ServedPolicy, target: ServedPolicy) -> None:
        if self._closed:
            raise FailedPrecondition("the job is being released", kind=kinds.JOB_RELEASED)
        for name in (source.name, target.name):
            if name in self._shared:
                raise FailedPrecondition(
                    f"policy '{name}' shares its engines with others, and shared engines never "
                    "move",
                    kind="engine_shared",
                    field="policy",
                    value=target.name,
                    remedy=f"Set policies.{name}.engine.share to `never` in the next job.",
                )
        balancing = self._spec.balancing
        if (source.name, target.name) in balancing.barred(self._spec.policies, self._shared):
            raise FailedPrecondition(
                f"an engine of policy '{source.name}' cannot serve '{target.name}': their models "
                "or engine settings differ",
                kind="engine_not_movable",
                field="policy",
                value=target.name,
                remedy="Set balancing.rebuild; attached servers never move.",
            )
        keeper = source.keeper(engine_id)
        assert keeper is not None  # its holder
        if keeper.busy or not keeper.may_serve:
            state = common_pb.EngineState.Name(keeper.engine.state).removeprefix("ENGINE_STATE_")
            raise FailedPrecondition(
                f"the engine is {state}" + (" and changing" if keeper.busy else ""),
                kind="engine_not_serving",
                field="engine_id",
                value=engine_id,
                remedy="Move a serving engine, or wait.",
            )
        minimum = balancing.minimum_of(source.name)
        if source.serving - 1 < minimum:
            raise FailedPrecondition(
                f"policy '{source.name}' has {source.serving} serving engines and keeps {minimum}",
                kind="policy_at_minimum",
                field="engine_id",
                value=engine_id,
                remedy="Lower balancing.minimum, or move an engine of another policy.",
            )

    async def _run_move(
        self,
        engine: ServingEngine,
        source: ServedPolicy,
        target: ServedPolicy,
        drain_seconds: float,
    ) -> rollout_pb.MoveEngineResponse:
        began = time.monotonic()
        policies = self._spec.policies
        rebuilt = exchange(policies[source.name], policies[target.name]) == "rebuild"
        handed_back = 0
        try:
            if (
                engine.state != common_pb.ENGINE_STATE_DEAD
            ):  # it has just died, and its turns have left
                handed_back = await engine.drain(
                    f"goes to policy '{target.name}'", deadline_seconds=drain_seconds
                )
            drained = time.monotonic()
            engine = await self._convert(engine, target, rebuilt)
            keeper = target.adopt(engine)
            source.forget(engine.engine_id)
            await self._reach_target(keeper)
            target.open_to_turns(engine.engine_id)
        except Exception as error:
            log.warning(
                "an engine returns to its policy",
                engine=engine.engine_id,
                policy=source.name,
                target=target.name,
                reason=str(error),
            )
            await self._take_back(engine, source, target, rebuilt)
            raise
        done = time.monotonic()
        log.info("an engine has moved", engine=engine.engine_id, policy=target.name)
        return rollout_pb.MoveEngineResponse(
            source=source.name,
            # From the last moment at which the engine could take a turn to the first one after.
            seconds=done - began,
            drain_seconds=drained - began,
            handed_back=handed_back,
            rebuilt=rebuilt,
        )

    async def _convert(
        self, engine: ServingEngine, policy: ServedPolicy, rebuilt: bool
    ) -> ServingEngine:
        if not rebuilt:
            engine.assign(policy.name)
            return engine
        await engine.stop()
        # In a thread: it may import an engine's libraries.
        return await asyncio.to_thread(self._remake, engine.engine_id, policy.name)

    async def _reach_target(self, keeper: EngineKeeper) -> None:
        for _ in range(_UPDATES):  # newer versions may appear meanwhile
            await keeper.reach_target()
            if keeper.serves_target:
                return
        engine = keeper.engine
        raise Unavailable(
            f"engine {engine.engine_id} does not serve '{engine.policy}' after {_UPDATES} updates",
            kind="engine_not_serving",
        )

    async def _take_back(
        self, engine: ServingEngine, source: ServedPolicy, target: ServedPolicy, rebuilt: bool
    ) -> None:
        # It stays listed with its present policy until the other lists it again.
        target.set_aside(engine.engine_id)
        try:
            back = await self._convert(engine, source, rebuilt)
        except Exception as error:
            # It cannot be assigned in this state: remake it for its former policy.
            log.warning("an engine is remade", engine=engine.engine_id, reason=str(error))
            back = await self._convert(engine, source, rebuilt=True)
        target.forget(back.engine_id)
        source.forget(back.engine_id)
        source.adopt(back)
        source.open_to_turns(back.engine_id)
