"""`ServerHost`: one inference server under the engines of one or several policies.

It owns what there is once: the process or attachment, the base weights, the slots for adapters, the
probe, the memory. Each engine has its policy's versions, turns and state."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from services.rollout.engines.errors import UpdateFailed
from services.rollout.engines.hosts import EngineHost
from services.rollout.engines.requests import MEMORY, Memory
from services.rollout.engines.server_process import EngineDevices
from services.rollout.engines.servers.adapters import AdapterSlots
from services.rollout.engines.servers.interface import SERVER_ERRORS, ServerLoad
from services.rollout.engines.servers.managed import Health, ManagedServer
from services.rollout.engines.servers.update import prove
from services.rollout.engines.weights import BaseWeights, other_base
from troupe.job import PolicySpec

MISSES_UNTIL_DEAD: Final = 3
# A check ends before its caller gives up on it, so that a missed one is counted; before it the
# server is asked for its load.
_CHECK_SECONDS: Final = 16.0
_LOAD_SECONDS: Final = 3.0
# Engines of one server take each other's probes if they are as young as the pause between two.
_FRESH_SECONDS: Final = 0.9


class Standing(Protocol):
    """An engine, as its host sees it."""

    engine_id: str

    @property
    def up(self) -> bool:
        """Whether it has started, and not ended."""

    @property
    def serving(self) -> bool:
        """Whether it takes turns."""

    @property
    def asleep(self) -> frozenset[Memory]:
        """The memory that it has given up."""

    @property
    def in_flight(self) -> int:
        """Number of its turns."""

    def host_died(self, reason: str) -> None:
        """The server is gone, with all turns."""

    def host_doubted(self, reason: str) -> None:
        """Distrust the weights in the server, which are unknown."""


@dataclass(frozen=True)
class Probe:
    """Result of a probe. `gone`: it does not even answer. `misses`: probes in a row that it
    missed, this one included."""

    number: int = 0
    at: float = 0.0
    healthy: bool = False
    gone: bool = False
    misses: int = 0


class ServerHost(EngineHost):
    """See the module. Its engines call it; each of them starts, updates, sleeps and stops by
    itself."""

    def __init__(
        self,
        host_id: str,
        specs: Mapping[str, PolicySpec],
        engine_class: Callable[..., Any],
        *,
        replica: int = 0,
        deterministic: bool = False,
        devices: EngineDevices | None = None,
        routed_experts: bool = False,
    ) -> None:
        """`engine_class`: a kind of `ServerEngine`; the others: see there."""
        super().__init__(host_id, specs, engine_class, host=self)
        self.server = ManagedServer(
            engine_class.server_class,  # type: ignore[attr-defined]
            host_id,
            specs,
            replica=replica,
            deterministic=deterministic,
            devices=devices or EngineDevices(),
            routed_experts=routed_experts,
        )
        self.slots = AdapterSlots()
        # Cleared while the server must not be given turns.
        self.open = asyncio.Event()
        self.open.set()
        # The version of the weights in the server when turns were last let in, verified or not.
        self.loaded: int | None = None
        # Grows with every load of weights.
        self.updates = 0
        # Servers that were brought up.
        self.incarnation = 0
        self.answered = 0
        """Turns that were answered with tokens since the last probe."""
        self.reported = ServerLoad()
        self._engines: dict[str, Standing] = {}
        self._up = False
        self._starting: asyncio.Task[None] | None = None
        self._base: BaseWeights | None = None
        # Whether the present server holds the base, verified.
        self._holds_base = False
        self._loading_base = asyncio.Lock()
        # Memory that the server has released.
        self._released: frozenset[Memory] = frozenset()
        self._sleeping = asyncio.Lock()
        self._health: Health
        self._probe = Probe()
        self._probing: asyncio.Task[Probe] | None = None

    # Its engines, and the life of the server.

    def join(self, engine: Standing) -> None:
        """Let an engine stand on the host until `leave`."""
        self._engines[engine.engine_id] = engine

    async def leave(self, engine: Standing) -> None:
        """Take an engine that has ended away; with the last one the server ends. Repeatable."""
        if self._engines.pop(engine.engine_id, None) is not None and not self._engines:
            self._up = False
            if self._starting is not None:
                self._starting.cancel()
                await asyncio.wait([self._starting])
            self.slots.restart(None)
        if not self._engines:
            await self.server.down(for_good=True)

    async def up(self) -> None:
        """Bring the server up, unless it is; engines that ask at the same time share one launch.
        Raises `EngineStartFailed`."""
        if self._up and self.server.exited is None:
            return
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name=f"start-{self.host_id}")
            self._starting.add_done_callback(self._started)
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        if self._up:  # the others do not know yet
            self.died(self.server.exited or "it is launched anew", self.incarnation)
        await self.server.up()
        self.incarnation += 1
        self._holds_base, self._released = False, frozenset()
        self.slots.restart(self.server.adapter_slots)
        self.reported = ServerLoad()
        self._probe = Probe(self._probe.number)
        spec = next(iter(self.specs.values()))
        self._health = Health(self.server.api, spec.engine.running_limit)
        self._up = True

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting = None
        if not task.cancelled():
            task.exception()  # whoever waited for it has it

    def is_up(self, incarnation: int) -> bool:
        """Return whether the server of that incarnation runs, as far as is known."""
        return self._up and incarnation == self.incarnation

    def died(self, reason: str, incarnation: int) -> None:
        """End all engines, since the server of that incarnation is gone. Repeatable."""
        if incarnation != self.incarnation:
            return  # there is another one already
        self._up = self._holds_base = False
        self.slots.restart(None)
        for engine in list(self._engines.values()):
            if engine.up:
                engine.host_died(reason)

    # Base weights.

    @property
    def keeps_base(self) -> bool:
        """Whether the policies are a base and adapters over it: then it is loaded once."""
        return self.shared or any(spec.lora is not None for spec in self.specs.values())

    @property
    def base(self) -> BaseWeights | None:
        """The base that was loaded last."""
        return self._base

    def check_base(self, policy: str, base: BaseWeights) -> None:
        """Raise `WeightsRefused`, naming a tensor, unless a policy's base equals the others'.
        Blocking: compares the weights if they are not."""
        known = self._base
        if not self.shared or known is None or known.ref.checksum == base.ref.checksum:
            return
        others = ", ".join(name for name in self.specs if name != policy)
        raise other_base(known, base, policy, others)

    async def hold_base(
        self, policy: str, base: BaseWeights, load: Callable[[str], Awaitable[float]]
    ) -> float | None:
        """Have the server hold `base`, by `load(known)`, which verifies it; `known`: checksum of
        the weights before, empty if unknown. Return the seconds in which nothing was served; None:
        the server has it already. Raises `WeightsRefused`."""
        async with self._loading_base:
            await asyncio.to_thread(self.check_base, policy, base)
            former = self._base.ref.checksum if self._base is not None else ""
            if self._holds_base and former == base.ref.checksum:
                return None
            known, self._holds_base = (former if self._holds_base else ""), False
            exposed = await load(known)
            self._base, self._holds_base = base, True
            return exposed

    async def verify_base(self) -> None:
        """Doubt all that the server holds unless it still computes with the base. Raises the
        server's errors."""
        base = self._base
        if base is None or not self._holds_base:
            return
        updater = self.server.updater
        try:
            await prove(self.server.api, await updater.proof_of(base.ref, base.tensors), base.ref)
        except UpdateFailed as error:
            self.doubt_base(str(error))

    def doubt_base(self, reason: str) -> None:
        """Have all engines load anew: the base is not what the server holds. Repeatable."""
        self._holds_base = False
        for engine in list(self._engines.values()):
            engine.host_doubted(reason)

    # Memory.

    async def release(self, engine: Standing, tags: frozenset[Memory]) -> None:
        """Free memory that all engines have given up, `engine` now `tags`. Raises the server's
        errors, and TimeoutError."""
        async with self._sleeping:
            common = engine.asleep | tags
            for other in self._engines.values():
                if other is not engine and other.up:
                    common &= other.asleep
            wanted = common - self._released
            if not wanted:
                return
            self._holds_base = False
            if self.server.described.frees_memory:
                await self.server.free(wanted)
                self._released |= wanted
            elif not self._released:
                self._released, self._up = MEMORY, False
                await self.server.down(for_good=False)

    async def resume(self, tags: Collection[Memory]) -> None:
        """Allocate memory again, for an engine that needs it; a server that was ended instead
        comes `up`. Raises the server's errors."""
        async with self._sleeping:
            if wanted := self._released & frozenset(tags):
                await self.server.api.resume_memory(wanted)
                self._released -= wanted

    # Health.

    async def probe(self, seen: int) -> Probe:
        """Return a probe that an engine, which has seen the one of number `seen`, has not: engines
        that ask at the same time share one."""
        latest = self._probe
        if latest.number > seen and time.monotonic() - latest.at < _FRESH_SECONDS:
            return latest
        if self._probing is None:
            self._probing = asyncio.create_task(self._ask(), name=f"probe-{self.host_id}")
            self._probing.add_done_callback(self._probed)
        return await asyncio.shield(self._probing)

    def _probed(self, task: asyncio.Task[Probe]) -> None:
        self._probing = None
        if not task.cancelled():
            task.exception()

    async def _ask(self) -> Probe:
        answered, self.answered = self.answered, 0
        api, incarnation = self.server.api, self.incarnation
        try:
            async with asyncio.timeout(_LOAD_SECONDS):
                self.reported = await api.load()
        except SERVER_ERRORS:
            self.reported = ServerLoad()
        except TimeoutError:  # busy: the last report is the best
            pass
        healthy = gone = False
        engines = list(self._engines.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CHECK_SECONDS):
                # Whether it still generates is its keeper's concern, which may have paused it.
                healthy = await (
                    api.alive()
                    if self.server.followed
                    else self._health.generates(
                        answered,
                        sum(one.in_flight for one in engines),
                        self.reported,
                        serves=any(one.serving for one in engines),
                    )
                )
                gone = not healthy and not await api.alive()
        former = self._probe
        # A server paused for an update does not generate.
        counts = not healthy and self.open.is_set() and incarnation == self.incarnation
        misses = 0 if healthy else former.misses + counts
        self._probe = Probe(former.number + 1, time.monotonic(), healthy, gone, misses)
        return self._probe

    def waiting_of(self, running: int) -> int:
        """Return how many of an engine's `running` turns wait in the server: their share of those
        that it reported at the last probe."""
        reported = self.reported.waiting
        total = sum(one.in_flight for one in self._engines.values())
        if self.shared and total:
            reported = round(reported * running / total)
        return min(reported, running)
