"""An environment in a process of its own: for what computes, blocks, or may never return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from troupe.workflow.environments import wire
from troupe.workflow.environments.errors import EnvironmentFault
from troupe.workflow.environments.host import FaultLimits, Host
from troupe.workflow.environments.interface import Action, Properties, Reset, Step
from troupe.workflow.environments.pool import EnvironmentPool
from troupe.workflow.environments.process import EnvironmentProcess


class Hosted(Host):
    """Plays in a process borrowed from a pool from its first `reset` on until `close`.

    A process that passes the deadline of a reset or step is killed with all that it started; nobody
    else waits for it. `close` gives the process back.
    """

    def __init__(self, pool: EnvironmentPool, *, owns_pool: bool = False) -> None:
        super().__init__(pool.entrypoint, pool.limits)
        self._pool = pool
        self._owns_pool = owns_pool
        self._process: EnvironmentProcess | None = None
        self._opened: Properties | None = None

    @property
    def pid(self) -> int | None:
        """The process that it plays in now."""
        return self._process.pid if self._process is not None else None

    async def close(self) -> None:
        """Give the process back. Repeatable."""
        await super().close()
        process, self._process = self._process, None
        if process is not None:
            assert self._opened is not None
            self._pool.give_back(process, self._opened)
        if self._owns_pool:
            await self._pool.close()

    async def _open(self) -> Properties:
        if self._process is None or not self._process.alive:
            await self._discard()
            self._process, self._opened = await self._pool.borrow()
        assert self._opened is not None
        return self._opened

    async def _reset(self, seed: int) -> Reset:
        assert self._process is not None
        request = {"op": "reset", "seed": seed}
        return wire.to_reset(await self._process.ask(request, self._limits.reset_seconds))

    async def _step(self, actions: Mapping[str, Action]) -> Step:
        if self._process is None:
            raise EnvironmentFault(
                f"{self._name} failed before or was closed",
                reason="died",
                environment=self._name,
                remedy="Call `reset(seed)`.",
            )
        request = {"op": "step", "actions": dict(actions)}
        return wire.to_step(await self._process.ask(request, self._limits.step_seconds))

    async def _discard(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._pool.drop(process)


def hosted(
    entrypoint: str,
    args: Mapping[str, Any] | None = None,
    *,
    limits: FaultLimits | None = None,
) -> Hosted:
    """An environment `package.module:attribute`, called with `args` (JSON values), in a process of
    its own, which ends with `close` or with this process.

    Many trajectories share an `EnvironmentPool` instead, as `GameWorkflow` does.
    """
    pool = EnvironmentPool(entrypoint, args, processes=1, limits=limits)
    return Hosted(pool, owns_pool=True)
