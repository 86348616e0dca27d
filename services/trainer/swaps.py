"""Policies that leave a worker's device in the middle of their work, and come back."""

from __future__ import annotations

import asyncio

import structlog

from services.chassis.telemetry import Telemetry
from services.trainer.binding import Binding
from services.trainer.bindings import Bindings, Key
from services.trainer.compute import Compute, Standstill
from services.trainer.steps import Steps
from services.trainer.suspension import HalfStep
from troupe.job import JobSpec
from troupe.rpc import TroupeError
from troupe.v1 import common_pb2 as pb
from troupe.v1 import trainer_pb2

log = structlog.get_logger("troupe.trainer")


class Swaps:
    """Suspends and resumes what is bound here."""

    def __init__(
        self, bindings: Bindings, steps: Steps, compute: Compute, telemetry: Telemetry
    ) -> None:
        self._bindings, self._steps, self._compute = bindings, steps, compute
        self._standstill = Standstill(compute)
        self._seconds = telemetry.counter(
            "troupe_trainer_swap_seconds",
            "Devices kept from computing by policies that come and go.",
            ["job_id", "policy", "what"],
        )

    async def suspend(self, key: Key) -> trainer_pb2.SuspendedState:
        """Free the device of a policy; repeated, it says again where its state is.

        Raises NotFound of kind "not_bound", and as `Binding.suspend`: then it stays bound, unless
        the ranks of its gang have ended (Aborted of kind "gang_lost"): then it is bound no more.
        """
        bindings = self._bindings
        async with bindings.lock(key):
            parked = bindings.parked.get(key)
            if key not in bindings.bound and parked is not None and parked.suspended is not None:
                return parked.suspended
            binding, run = bindings.find(key), self._steps.running(key)
            # A step that has not gone on yet since it came is as it came.
            half = binding.half if run is None else await run.suspend()
            if binding.versions.dirty:
                await self._compute.run(binding.versions.reset)
            binding.move(pb.BINDING_STATE_SUSPENDING)
            try:
                # Whoever was brought here before computes meanwhile.
                with self._standstill.of_swap() as seconds:
                    state = await asyncio.to_thread(binding.suspend, half)
                    state.seconds = seconds()
            except TroupeError:
                binding.move(pb.BINDING_STATE_IDLE)
                if binding.learner.lost:
                    await self._give_up(binding, half)
                elif half is not None:  # the step goes on, whoever asks for it
                    self._steps.go_on(binding, half)
                raise
            self._steps.forget(key)
            bindings.parked[key] = bindings.bound.pop(key)
            binding.move(pb.BINDING_STATE_SUSPENDED)
            self._count(binding, "suspend", state.seconds)
            return state

    async def _give_up(self, binding: Binding, half: HalfStep | None) -> None:
        """Free the device of a policy whose ranks have ended: there is nothing to suspend, and who
        binds it goes on from the committed version."""
        if half is not None:
            await self._steps.give_back(binding, half)
        self._steps.forget((binding.job_id, binding.policy))
        del self._bindings.bound[(binding.job_id, binding.policy)]
        binding.move(pb.BINDING_STATE_RELEASED)
        await self._compute.run(binding.leave)

    async def resume(
        self,
        key: Key,
        spec: JobSpec,
        spec_json: str,
        version: int,
        checksum: str,
        state: trainer_pb2.SuspendedState,
    ) -> Binding:
        """Bind a policy where its suspension stopped. Raises as `Binding.resume`."""
        bindings = self._bindings
        # Also while it waits for what was asked for ahead.
        with self._standstill.of_swap() as seconds:
            async with bindings.lock(key):
                old = bindings.bound.get(key)
                if old is not None and old.resumed_from == state.key:
                    return old
                await self._steps.cancel(key)
                binding = bindings.shell(key, spec, spec_json)
                binding.move(pb.BINDING_STATE_BINDING)
                bindings.parked.pop(key, None)
                async with bindings.filling(key, binding, self._compute):
                    await self._compute.hold(binding.resume, state, version, checksum)
                self._count(binding, "resume", seconds())
                return binding

    async def prefetch(
        self, key: Key, spec: JobSpec, spec_json: str, state: trainer_pb2.SuspendedState
    ) -> None:
        """Have a suspended state ready for `resume`. What fails is left to that to tell."""
        bindings = self._bindings
        async with bindings.lock(key):
            if key in bindings.bound:
                return
            binding = bindings.parked[key] = bindings.shell(key, spec, spec_json)
            if binding.state == pb.BINDING_STATE_BINDING:  # new
                binding.move(pb.BINDING_STATE_RELEASED)
            await asyncio.to_thread(binding.prefetch, state)

    def _count(self, binding: Binding, what: str, seconds: float) -> None:
        binding.swapped(seconds)
        self._seconds.labels(binding.job_id, binding.policy, what).inc(seconds)
        log.info(what, job_id=binding.job_id, policy=binding.policy, seconds=round(seconds, 4))
