"""The policies at one worker, by job and name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from services.trainer.binding import Binding
from services.trainer.compute import Compute
from troupe.job import JobSpec
from troupe.rpc import NotFound
from troupe.v1 import common_pb2 as pb
from troupe.v1 import trainer_pb2

# Job and policy.
Key = tuple[str, str]


class Bindings:
    """Those that are bound here, and what is parked of those that are not. Of the event loop."""

    def __init__(self, make: Callable[[Key, JobSpec, str], Binding]) -> None:
        """`make`: a new binding of a policy of this specification, also given as JSON."""
        self.bound: dict[Key, Binding] = {}
        # Policies that were suspended here, or will be resumed: models without weights.
        self.parked: dict[Key, Binding] = {}
        self._make = make
        self._locks: dict[Key, asyncio.Lock] = {}

    def lock(self, key: Key) -> asyncio.Lock:
        """Binding, releasing, swapping and starting a step of one policy exclude each other."""
        return self._locks.setdefault(key, asyncio.Lock())

    def find(self, key: Key) -> Binding:
        """The policy, once it is loaded. Raises NotFound of kind "not_bound"."""
        binding = self.bound.get(key)
        if binding is None or binding.state == pb.BINDING_STATE_BINDING:
            raise NotFound(
                f"policy {key[1]} of job {key[0]} is not bound to this worker",
                kind="not_bound",
                field="policy",
                value=key[1],
                remedy="Bind it here, or ask the worker that it is bound to.",
            )
        return binding

    def shell(self, key: Key, spec: JobSpec, spec_json: str) -> Binding:
        """What is parked of a policy, if it is of this job as it is now; else a new one."""
        parked = self.parked.get(key)
        if parked is not None and parked.spec_json == spec_json:
            return parked
        return self._make(key, spec, spec_json)

    @contextlib.asynccontextmanager
    async def filling(self, key: Key, binding: Binding, compute: Compute) -> AsyncIterator[None]:
        """It is bound once it is filled inside; if that fails it is gone. Whatever was bound before
        leaves first: ranks of a gang know a policy by its key."""
        if (before := self.bound.pop(key, None)) is not None:
            await compute.run(before.leave_ranks)
        self.bound[key] = binding
        try:
            yield
        except BaseException as error:
            binding.move(pb.BINDING_STATE_RELEASED)
            del self.bound[key]
            if isinstance(error, Exception):  # else the worker stops, and ends them anyway
                await compute.run(binding.leave_ranks)
            raise
        binding.move(pb.BINDING_STATE_IDLE)

    def statuses(self) -> list[trainer_pb2.BindingStatus]:
        """All of them, by job and policy."""
        found = self.parked | self.bound
        return [found[key].status() for key in sorted(found)]
