"""Executors, cores, models and other resources of one host, and their assignment to calls.

`FunctionHost` is a host as the dispatcher sees it, either this one or an attached one. `LocalHost`
assembles this one from the settings.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Final

import structlog

from services.chassis.telemetry import Telemetry
from services.reward.call import CallOutcome, FunctionCall
from services.reward.cgroups import (
    ControlGroups,
    CoreCount,
    CoreLease,
    CoreManager,
    choose_backend,
    open_groups,
    usable_cores,
)
from services.reward.executor import CallExecutor, ProcessExecutor
from services.reward.function import RegisteredFunction
from services.reward.gpu.manager import ModelManager, ModelUnavailable
from services.reward.resources import CORES, MEMORY, PLENTY, SANDBOX, WORKERS, HostResources
from services.reward.sandboxes.kinds import PROVIDERS, open_providers
from services.reward.sandboxes.manager import SandboxLimits, SandboxManager
from services.reward.sandboxes.profile import SandboxProfile
from services.reward.settings import RewardSettings
from troupe.rpc import InvalidArgument
from troupe.scheduling import elastic
from troupe.v1 import reward_pb2 as reward_pb

log = structlog.get_logger("troupe.reward")

# The name of the service's own host.
OWN_HOST: Final = ""
# The variable in which a call finds the URL of its model (`troupe.functions.models`).
MODEL_URL: Final = "TROUPE_MODEL_URL"


class FunctionHost:
    """The executors of one host, one per call that may run at once.

    An executor that was idle for `idle_seconds` (or for its last function's time) loses its
    process, except for `min_workers` and for processes that functions keep.
    """

    def __init__(
        self,
        name: str,
        executors: Sequence[CallExecutor],
        cores: CoreManager | CoreCount | None = None,
        *,
        resources: HostResources | None = None,
        models: ModelManager | None = None,
        min_workers: int = 0,
        idle_seconds: float = 60.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`name`: empty for the service's own host. `cores` hands cores out; None: it does not.
        `models`: those that this process moves to devices; None on an attached host."""
        self.name = name
        self.resources = resources or HostResources({}, plenty=(MEMORY, SANDBOX))
        self._models = models
        # Executor -> the model that its calls use.
        self._users: dict[CallExecutor, str] = {}
        # Executor -> event that ends its calls, even before the executor has begun them.
        self._cancels: dict[CallExecutor, asyncio.Event] = {}
        self.cores = cores
        # First invocation of a chunk -> what it holds, as the scheduler knows it.
        self.running: dict[str, elastic.Running] = {}
        self._executors = tuple(executors)
        # The longest idle first.
        self._idle = list(executors)
        # Busy executors of stateful sandboxes. They are not in `executors`, but each counts as one.
        self._sandbox_executors: set[CallExecutor] = set()
        # Moves of models to devices.
        self._loading: set[asyncio.Task[str]] = set()
        self._min_workers = min_workers
        self._idle_seconds = idle_seconds
        self._clock = clock
        # The time since which an executor is idle or busy, and the function that it ran last.
        self._since: dict[CallExecutor, float] = {}
        self._last: dict[CallExecutor, RegisteredFunction] = {}
        self._busy_seconds = 0.0

    @property
    def workers(self) -> int:
        """Calls that may run at once."""
        return len(self._executors)

    @property
    def total_cores(self) -> int:
        """Cores that it leases, free or not; 0: it does not lease cores."""
        return 0 if self.cores is None else self.cores.total

    @property
    def residents(self) -> Mapping[str, int]:
        """Model -> its first device, of the models that are on devices."""
        return {} if self._models is None else self._models.residents()

    @property
    def free(self) -> int:
        """Calls that could begin now."""
        return max(0, len(self._idle) - len(self._sandbox_executors))

    @property
    def alive(self) -> int:
        """Executors that have a process, or are about to."""
        return self.workers - self.cold

    @property
    def cold(self) -> int:
        """Executors without a process."""
        return sum(not executor.warm for executor in self._idle)

    @property
    def restarts(self) -> int:
        """Processes replaced so far."""
        return sum(executor.restarts for executor in self._executors)

    @property
    def provisioned_seconds(self) -> float:
        """Seconds for which executors had a process, summed over executors."""
        return sum(executor.process_seconds for executor in self._executors)

    @property
    def busy_seconds(self) -> float:
        """Seconds for which executors ran calls, or were made ready for one."""
        now, idle = self._clock(), set(self._idle)
        return self._busy_seconds + sum(
            now - self._since[executor] for executor in self._executors if executor not in idle
        )

    async def start(self) -> None:
        """Start the worker processes that the host always has."""
        await asyncio.gather(*(executor.start() for executor in self._idle[: self._min_workers]))

    async def stop(self) -> None:
        """End all processes."""
        await asyncio.gather(*(executor.stop() for executor in self._executors))
        for loading in self._loading:
            loading.cancel()
        await asyncio.gather(*self._loading, return_exceptions=True)
        if self._models is not None:
            await self._models.stop()

    def view(
        self, startable: int, functions: Iterable[RegisteredFunction], *, plenty: bool
    ) -> elastic.Host:
        """Return the host as the scheduler sees it, when `startable` processes may be started and
        calls of `functions` are queued; `plenty`: other hosts hand out cores."""
        free = {WORKERS: min(self.free, len(self._idle) - self.cold + startable)}
        if self.cores is not None:
            free[CORES] = self.cores.free
        elif plenty:
            free[CORES] = PLENTY
        warm = {f.key for f in functions if any(executor.holds(f) for executor in self._idle)}
        running = tuple(self.running.values())
        if others := dict.fromkeys(resource for f in functions for resource in f.needs):
            free |= self.resources.free(others, running)
        return elastic.Host(self.name, free, running, warm)

    def room(self, function: RegisteredFunction) -> int:
        """Return how many calls of `function` fit when no other function's call runs."""
        few = self.cores is not None and self.cores.total < function.cores
        if few or (function.own_sandbox and self.name != OWN_HOST):
            return 0
        return min(self.workers, self.resources.room(function.needs, self.running.values()))

    def take(
        self, function: RegisteredFunction, cores: int, sandbox_executor: CallExecutor | None = None
    ) -> tuple[CallExecutor, CoreLease | None]:
        """Return an executor for calls of `function`, and `cores` cores; `sandbox_executor`: the
        executor of the call's sandbox. Raises ValueError if there are no devices for the model that
        the function needs."""
        model = function.spec.model_service
        placement = self.resources.placement
        if model and placement is not None:
            placement.begin(model)
        executor = sandbox_executor or self._choose(function)
        self._cancels[executor] = asyncio.Event()
        if model and placement is not None:
            self._users[executor] = model
        if sandbox_executor is not None:
            self._sandbox_executors.add(executor)
            self._since[executor] = self._clock()
        else:
            self._occupy(executor, function)
        return executor, None if self.cores is None else self.cores.take(executor.name, cores)

    def _occupy(self, executor: CallExecutor, function: RegisteredFunction) -> CallExecutor:
        self._idle.remove(executor)
        self._last[executor] = function
        self._since[executor] = self._clock()
        return executor

    def give_back(self, executor: CallExecutor, lease: CoreLease | None) -> float:
        """Release the executor and the cores of calls that have ended; return the seconds for which
        they held it."""
        self._cancels.pop(executor, None)
        if lease is not None and self.cores is not None:
            self.cores.give_back(lease)
        placement = self.resources.placement
        if (model := self._users.pop(executor, None)) and placement is not None:
            placement.end(model)
        now = self._clock()
        seconds = now - self._since.pop(executor)
        if executor in self._sandbox_executors:
            self._sandbox_executors.remove(executor)
            return seconds
        self._busy_seconds += seconds
        self._since[executor] = now
        self._idle.append(executor)
        return seconds

    def cancel(self, executor: CallExecutor) -> None:
        """End the call that an executor runs, or is about to."""
        if (cancelled := self._cancels.get(executor)) is not None:
            cancelled.set()
            executor.cancel()

    async def run_many(
        self,
        executor: CallExecutor,
        function: RegisteredFunction,
        calls: Sequence[FunctionCall],
        lease: CoreLease | None,
    ) -> AsyncGenerator[tuple[int, CallOutcome]]:
        """Run `executor.run_many` once the calls' model is on devices."""
        began, cancelled = self._clock(), self._cancels[executor]
        if self._models is not None and (model := function.spec.model_service):
            try:
                url = await self._ready(self._models, model, cancelled)
            except ModelUnavailable as error:
                kind = reward_pb.InvocationError.KIND_MODEL_UNAVAILABLE
                seconds = self._clock() - began
                yield 0, CallOutcome.failed(kind, str(error), cold_seconds=seconds)
                return
            for call in calls:
                call.environment = {MODEL_URL: url}
        if cancelled.is_set():
            kind = reward_pb.InvocationError.KIND_CANCELLED
            yield 0, CallOutcome.failed(kind, "cancelled before it ran")
            return
        async with aclosing(executor.run_many(function, calls, lease)) as outcomes:
            async for found in outcomes:
                yield found

    async def _ready(self, models: ModelManager, name: str, cancelled: asyncio.Event) -> str:
        """Return the URL of a model once it is on devices; "" once `cancelled`. Raises
        ModelUnavailable."""
        # A move is never cancelled, since later calls rely on the placement.
        loading = asyncio.create_task(models.ready(name))
        self._loading.add(loading)
        loading.add_done_callback(self._loaded)
        leaving = asyncio.create_task(cancelled.wait())
        try:
            await asyncio.wait((loading, leaving), return_when=asyncio.FIRST_COMPLETED)
            return await loading if loading.done() else ""
        finally:
            leaving.cancel()

    def _loaded(self, loading: asyncio.Task[str]) -> None:
        self._loading.discard(loading)
        if not loading.cancelled():
            loading.exception()  # marks it as seen: its callers may have left

    def warm_for(self, function: RegisteredFunction) -> int:
        """Return the number of idle executors that have imported `function`."""
        return sum(executor.holds(function) for executor in self._idle)

    async def warm_up(self, function: RegisteredFunction) -> None:
        """Start `function.spec.min_workers` processes that have imported it, if executors are
        free."""
        holding = sum(executor.holds(function) for executor in self._executors)
        wanted = max(0, function.spec.min_workers - holding)
        taken = [
            self._occupy(self._choose(function), function) for _ in range(min(wanted, self.free))
        ]
        try:
            await asyncio.gather(*(executor.warm_up(function) for executor in taken))
        finally:
            for executor in taken:
                self.give_back(executor, None)

    def idle_seconds(self, function: RegisteredFunction) -> float:
        """Return how long a process that ran `function` last waits for another call."""
        own = function.spec.HasField("idle_seconds")
        return function.spec.idle_seconds if own else self._idle_seconds

    def reap(self) -> float | None:
        """End processes that were idle for too long; seconds until the next will have been, None
        if there is none."""
        now, next_look = self._clock(), None
        spare = self.alive - self._min_workers
        kept: dict[str, int] = {}
        for executor in list(self._idle):
            function = self._last.get(executor)
            if not executor.warm or function is None:
                continue
            kept[function.key] = kept.get(function.key, 0) + 1
            if spare <= 0 or kept[function.key] <= function.spec.min_workers:
                continue
            left = self._since[executor] + self.idle_seconds(function) - now
            if left <= 0:
                executor.rest()
                spare -= 1
            else:
                next_look = left if next_look is None else min(left, next_look)
        return next_look

    def _choose(self, function: RegisteredFunction) -> CallExecutor:
        """Return an idle executor, in order of preference: one that has imported the function, one
        whose process could, one without a process, the longest idle."""
        latest = self._idle[::-1]
        ways = (
            (executor for executor in latest if executor.holds(function)),
            (executor for executor in latest if executor.warm and executor.confined_for(function)),
            (executor for executor in latest if not executor.warm),
            self._idle,
        )
        return next(itertools.chain.from_iterable(ways))


class LocalHost:
    """This host: its executors, cores, models, control groups and stateful sandboxes."""

    def __init__(self, settings: RewardSettings, telemetry: Telemetry) -> None:
        """Raises `InvalidArgument` for cores that do not exist, and models that fit nowhere."""
        self._groups = groups = open_groups()
        self._cores = _core_manager(settings, groups)
        providers = open_providers(groups, self._cores)
        executors = [
            ProcessExecutor(
                settings.reward_import_seconds,
                f"worker-{i}",
                providers,
                spares=settings.reward_spares,
            )
            for i in range(settings.reward_workers)
        ]
        models = None
        if settings.reward_models:
            models = ModelManager(settings.reward_models, settings.reward_gpus, telemetry)
        memory = {MEMORY: settings.reward_memory_mib} if settings.reward_memory_mib else {}
        placement = None if models is None else models.placement
        self.host = FunctionHost(
            OWN_HOST,
            executors,
            self._cores,
            min_workers=settings.reward_min_workers,
            idle_seconds=settings.reward_idle_seconds,
            resources=HostResources(memory, placement, plenty=(MEMORY, SANDBOX)),
            models=models,
        )
        self.sandboxes = SandboxManager(
            SandboxLimits(
                settings.reward_sandboxes,
                settings.reward_sandbox_memory_mib,
                settings.reward_sandbox_idle_seconds,
            ),
            settings.reward_import_seconds,
            providers,
        )
        log.info(
            "sandboxes",
            **{level: ", ".join(self.confinement(SandboxProfile(level))) for level in PROVIDERS},
        )

    def confinement(self, profile: SandboxProfile) -> list[str]:
        """Return the mechanisms that confine this profile on this host: "namespaces", "seccomp",
        ..."""
        return PROVIDERS[profile.level].layers(profile, self._groups)

    def close(self) -> None:
        """Remove the control groups; all processes have ended."""
        for manager in (self._cores, self._groups):
            if manager is not None:
                manager.close()


def _core_manager(settings: RewardSettings, groups: ControlGroups | None) -> CoreManager | None:
    if not settings.reward_cores:
        return None
    try:
        nodes = usable_cores(settings.reward_cores)
        manager = CoreManager(nodes, choose_backend(groups, settings.reward_core_backend))
    except (ValueError, OSError) as error:
        raise InvalidArgument(
            str(error),
            field="TROUPE_REWARD_CORES",
            value=settings.reward_cores,
            remedy="Name as many cores as this process may use, and a backend that works here "
            "(TROUPE_REWARD_CORE_BACKEND=auto).",
        ) from error
    log.info("cores are handed out", cores=settings.reward_cores, backend=manager.kind)
    return manager
