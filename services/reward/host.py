"""Where calls run together: the places of one host, and the cores that it hands out to them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final, Protocol

import structlog

from services.chassis.telemetry import Telemetry
from services.reward.call import CallOutcome, FunctionCall, WorkerPlace
from services.reward.function import RegisteredFunction
from services.reward.gpu import ModelManager, ModelUnavailable
from services.reward.groups import (
    CgroupLimits,
    ControlGroups,
    CoreLease,
    CoreManager,
    choose_backend,
    open_groups,
    usable_cores,
)
from services.reward.queues import CORES, WORKERS
from services.reward.sandbox import CONTAINER, LEVELS, PROCESS, SandboxProfile
from services.reward.sandboxes.container import find_engine
from services.reward.sandboxes.keeper import SandboxKeeper, SandboxLimits
from services.reward.sandboxes.seccomp import filter_path
from services.reward.settings import RewardSettings
from services.reward.slot import ProcessSlot
from services.reward.stock import MEMORY, PLENTY, SANDBOX, HostResources
from troupe.rpc import FailedPrecondition, InvalidArgument
from troupe.scheduling import elastic
from troupe.v1 import reward_pb2 as pb

# Where a call finds the model that it needs.
MODEL_URL: Final = "TROUPE_MODEL_URL"


class Cores(Protocol):
    """Who hands out cores: `services.reward.cpu.CoreManager` here, a count of those elsewhere."""

    @property
    def free(self) -> int:
        """Cores that nobody holds."""

    def take(self, group: str, count: int) -> CoreLease:
        """`count` cores for `group`, which nobody else gets."""

    def give_back(self, lease: CoreLease) -> None:
        """The call has ended."""


class FunctionHost:
    """The places of one host: as many calls at once as there are of them.

    A place without calls for `idle_seconds` (or what its last function says) has its process ended,
    but for `min_workers` and what functions want kept.
    """

    def __init__(
        self,
        name: str,
        places: Sequence[WorkerPlace],
        cores: Cores | None = None,
        *,
        min_workers: int = 0,
        idle_seconds: float = 60.0,
        stock: HostResources | None = None,
        models: ModelManager | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`name`: empty for the service's own host. `stock`: what it has beside places and cores;
        `models`: those that it puts on devices itself."""
        self.name = name
        self.stock = stock or HostResources({}, plenty=(MEMORY, SANDBOX))
        self._models = models
        self._users: dict[WorkerPlace, str] = {}
        # Whether what runs at a place is to end, also before the place knows of it.
        self._cancels: dict[WorkerPlace, asyncio.Event] = {}
        self.cores = cores
        # What runs here, as the scheduler knows it, by its first invocation.
        self.running: dict[str, elastic.Running] = {}
        self._places = tuple(places)
        # The longest idle first.
        self._idle = list(places)
        # Places that are not its own, where calls run now.
        self._guests: set[WorkerPlace] = set()
        # Models that are brought to devices.
        self._loading: set[asyncio.Task[str]] = set()
        self._min_workers = min_workers
        self._idle_seconds = idle_seconds
        self._clock = clock
        # Since when a place is idle or busy, and the function that it ran last.
        self._since: dict[WorkerPlace, float] = {}
        self._last: dict[WorkerPlace, RegisteredFunction] = {}
        self._busy_seconds = 0.0

    @property
    def workers(self) -> int:
        """Calls that may run at once."""
        return len(self._places)

    @property
    def total_cores(self) -> int:
        """Cores that it hands out, free or not; 0: it hands out none."""
        if self.cores is None:
            return 0
        return self.cores.free + sum(r.holds.get(CORES, 0) for r in self.running.values())

    @property
    def residents(self) -> Mapping[str, int]:
        """The first device of each of its models that is on devices."""
        return {} if self._models is None else self._models.residents()

    @property
    def free(self) -> int:
        """Calls that could begin now."""
        return max(0, len(self._idle) - len(self._guests))

    @property
    def alive(self) -> int:
        """Places that have a process, or are about to."""
        return self.workers - self.cold

    @property
    def cold(self) -> int:
        """Places without a process."""
        return sum(not place.warm for place in self._idle)

    @property
    def restarts(self) -> int:
        """Processes that had to be replaced so far."""
        return sum(place.restarts for place in self._places)

    @property
    def provisioned_seconds(self) -> float:
        """Seconds that processes were there, of all places together."""
        return sum(place.lived for place in self._places)

    @property
    def busy_seconds(self) -> float:
        """Seconds that places ran calls, or were made ready for one."""
        now, idle = self._clock(), set(self._idle)
        return self._busy_seconds + sum(
            now - self._since[place] for place in self._places if place not in idle
        )

    async def start(self) -> None:
        """Have as many processes as there are to be at any time."""
        await asyncio.gather(*(place.start() for place in self._idle[: self._min_workers]))

    async def stop(self) -> None:
        """End all processes."""
        await asyncio.gather(*(place.stop() for place in self._places))
        for loading in self._loading:
            loading.cancel()
        await asyncio.gather(*self._loading, return_exceptions=True)
        if self._models is not None:
            await self._models.stop()

    def view(
        self, startable: int, functions: Iterable[RegisteredFunction], *, plenty: bool
    ) -> elastic.Host:
        """What the scheduler sees when so many processes may be started, and `functions` wait;
        `plenty`: other hosts hand out cores."""
        free = {WORKERS: min(self.free, len(self._idle) - self.cold + startable)}
        if self.cores is not None:
            free[CORES] = self.cores.free
        elif plenty:
            # A host that hands out no cores, beside one that does.
            free[CORES] = PLENTY
        warm = {f.key for f in functions if any(place.holds(f) for place in self._idle)}
        running = tuple(self.running.values())
        if others := dict.fromkeys(resource for f in functions for resource in f.needs):
            free |= self.stock.free(others, running)
        return elastic.Host(self.name, free, running, warm)

    def take(
        self, function: RegisteredFunction, cores: int, guest: WorkerPlace | None = None
    ) -> tuple[WorkerPlace, CoreLease | None]:
        """A place for calls of `function`, and that many cores.

        `guest` is a place of the call's own: it counts as one of the calls that run at once.
        Raises ValueError where there is no cell for the model that it needs.
        """
        model = function.spec.model_service
        if model and self.stock.board is not None:
            self.stock.board.begin(model)
        place = guest or self._choose(function)
        self._cancels[place] = asyncio.Event()
        if model and self.stock.board is not None:
            self._users[place] = model
        if guest is not None:
            self._guests.add(guest)
            self._since[place] = self._clock()
        else:
            self._occupy(place, function)
        return place, None if self.cores is None else self.cores.take(place.name, cores)

    def _occupy(self, place: WorkerPlace, function: RegisteredFunction) -> WorkerPlace:
        self._idle.remove(place)
        self._last[place] = function
        self._since[place] = self._clock()
        return place

    def give_back(self, place: WorkerPlace, lease: CoreLease | None) -> float:
        """The calls have ended; returns the seconds that they had the place."""
        self._cancels.pop(place, None)
        if lease is not None and self.cores is not None:
            self.cores.give_back(lease)
        if (model := self._users.pop(place, None)) and self.stock.board is not None:
            self.stock.board.end(model)
        now = self._clock()
        seconds = now - self._since.pop(place)
        if place in self._guests:
            self._guests.remove(place)
            return seconds
        self._busy_seconds += seconds
        self._since[place] = now
        self._idle.append(place)
        return seconds

    def cancel(self, place: WorkerPlace) -> None:
        """End the call that runs at a place, or is about to."""
        if (cancelled := self._cancels.get(place)) is not None:
            cancelled.set()
            place.cancel()

    async def run_many(
        self,
        place: WorkerPlace,
        function: RegisteredFunction,
        calls: Sequence[FunctionCall],
        lease: CoreLease | None,
    ) -> AsyncGenerator[tuple[int, CallOutcome]]:
        """`place.run_many`, once the model that the calls need is on devices."""
        began, cancelled = self._clock(), self._cancels[place]
        if self._models is not None and (model := function.spec.model_service):
            try:
                url = await self._ready(self._models, model, cancelled)
            except ModelUnavailable as error:
                kind = pb.InvocationError.KIND_MODEL_UNAVAILABLE
                failed = pb.InvocationError(kind=kind, message=str(error))
                yield 0, CallOutcome(error=failed, cold_seconds=self._clock() - began)
                return
            for call in calls:
                call.environment = {MODEL_URL: url}
        if cancelled.is_set():
            kind = pb.InvocationError.KIND_CANCELLED
            ended = pb.InvocationError(kind=kind, message="cancelled before it ran")
            yield 0, CallOutcome(error=ended)
            return
        async with aclosing(place.run_many(function, calls, lease)) as outcomes:
            async for found in outcomes:
                yield found

    async def _ready(self, models: ModelManager, name: str, cancelled: asyncio.Event) -> str:
        """The URL of a model that is on devices; "" once `cancelled`. Raises ModelUnavailable."""
        # It goes on to where the board says, whoever still waits: others may be next.
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
            loading.exception()  # said to who waited, if anybody did

    def warm_for(self, function: RegisteredFunction) -> int:
        """Idle places that have imported `function`."""
        return sum(place.holds(function) for place in self._idle)

    async def warm_up(self, function: RegisteredFunction) -> None:
        """Have `function.spec.min_workers` processes that have imported it, as far as places go."""
        holding = sum(place.holds(function) for place in self._places)
        wanted = max(0, function.spec.min_workers - holding)
        taken = [
            self._occupy(self._choose(function), function) for _ in range(min(wanted, self.free))
        ]
        try:
            await asyncio.gather(*(place.warm_up(function) for place in taken))
        finally:
            for place in taken:
                self.give_back(place, None)

    def idle_seconds(self, function: RegisteredFunction) -> float:
        """How long a process waits for calls that ran `function` last."""
        own = function.spec.HasField("idle_seconds")
        return function.spec.idle_seconds if own else self._idle_seconds

    def reap(self) -> float | None:
        """End processes that were idle for too long; returns in how many seconds to look again,
        None when none is."""
        now, next_look = self._clock(), None
        spare = self.alive - self._min_workers
        kept: dict[str, int] = {}
        for place in list(self._idle):
            function = self._last.get(place)
            if not place.warm or function is None:
                continue
            kept[function.key] = kept.get(function.key, 0) + 1
            if spare <= 0 or kept[function.key] <= function.spec.min_workers:
                continue
            left = self._since[place] + self.idle_seconds(function) - now
            if left <= 0:
                place.rest()
                spare -= 1
            else:
                next_look = left if next_look is None else min(left, next_look)
        return next_look

    def _choose(self, function: RegisteredFunction) -> WorkerPlace:
        """One that has imported it; one that could; one without a process; the longest idle."""
        latest = self._idle[::-1]
        ways = (
            (p for p in latest if p.holds(function)),
            (p for p in latest if p.warm and p.suits(function)),
            (p for p in latest if not p.warm),
            self._idle,
        )
        return next(itertools.chain.from_iterable(ways))


def layers(cage: SandboxProfile, groups: ControlGroups | None) -> list[str]:
    """Their names, for people: "namespaces", "seccomp", "cgroup:memory", ..."""
    if cage.level == CONTAINER:
        try:
            return [f"container:{Path(find_engine()).name}"]
        except FailedPrecondition:
            return []
    limited = ["rlimit:as"] if cage.memory_mib else []
    if cage.level == PROCESS:
        return [*limited, *(["landlock"] if cage.reads or cage.writes else [])]
    found = ["namespaces", "read-only root", "no_new_privs", "rlimits", *limited]
    if filter_path() is not None:
        found.append("seccomp")
    if groups is not None:
        found += [f"cgroup:{name}" for name in ("memory", "pids") if name in groups.controllers]
    return found


log = structlog.get_logger("troupe.reward")


class Workplace:
    """Worker processes of this host, its cores, and the limits of its sandboxes."""

    def __init__(self, settings: RewardSettings, telemetry: Telemetry) -> None:
        """Raises `InvalidArgument` for cores that there are not, and models that fit nowhere."""
        self._groups = groups = open_groups()
        self._cores = _core_manager(settings, groups)
        self._fence = CgroupLimits(groups) if groups is not None else None
        slots = [
            ProcessSlot(
                settings.reward_import_seconds,
                f"worker-{i}",
                self._cores,
                self._fence,
                spares=settings.reward_spares,
            )
            for i in range(settings.reward_workers)
        ]
        models = None
        if settings.reward_models:
            models = ModelManager(settings.reward_models, settings.reward_gpus, telemetry)
        memory = {MEMORY: settings.reward_memory_mib} if settings.reward_memory_mib else {}
        stock = HostResources(
            memory, None if models is None else models.board, plenty=(MEMORY, SANDBOX)
        )
        self.host = FunctionHost(
            "",
            slots,
            self._cores,
            min_workers=settings.reward_min_workers,
            idle_seconds=settings.reward_idle_seconds,
            stock=stock,
            models=models,
        )
        self.sandboxes = SandboxKeeper(
            SandboxLimits(
                settings.reward_sandboxes,
                settings.reward_sandbox_memory_mib,
                settings.reward_sandbox_idle_seconds,
            ),
            settings.reward_import_seconds,
            groups=groups,
            cores=self._cores,
        )

        log.info(
            "sandboxes",
            **{level: ", ".join(self.confinement(SandboxProfile(level))) for level in LEVELS},
        )

    def confinement(self, cage: SandboxProfile) -> list[str]:
        """What confines calls here that are to be confined so."""
        return layers(cage, self._groups)

    def close(self) -> None:
        """All its processes have ended."""
        if self._cores is not None:
            self._cores.close()
        if self._fence is not None:
            self._fence.close()


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
