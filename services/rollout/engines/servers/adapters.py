"""Versions that are LoRA adapters, of one or several policies, side by side in one server."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from services.rollout.engines.errors import Refused, ServerGone, UpdateFailed
from services.rollout.engines.servers.interface import SERVER_ERRORS
from services.rollout.engines.servers.managed import ManagedServer
from services.rollout.engines.servers.update import prove
from services.rollout.engines.servers.verification import update_failed
from services.rollout.engines.weights import Adapted, refused_adapter
from troupe.checkpoints.adapters import MergeMismatch
from troupe.checkpoints.proof import Proof
from troupe.v1 import common_pb2 as common_pb

log = logging.getLogger(__name__)

# How long a version waits until turns of older ones have ended: turns of 32k tokens take half an
# hour on a full server.
SLOT_SECONDS: Final = 3600.0


@dataclass(frozen=True)
class ServedAdapter:
    """Weights that generate a turn: an adapter by the server's name and its version; the base of
    adapters, without a name, as a version; or, both None, whole weights, whose version the server
    reports."""

    name: str | None = None
    version: int | None = None


class AdapterSlots:
    """The adapters that one server holds, of all policies: no more than fit into one batch, so that
    no turn waits for another one's adapter to leave."""

    def __init__(self) -> None:
        self.limit: int | None = None
        """None: as many as are wanted."""
        self._names: set[str] = set()
        self._incarnation = 0
        self._changed = asyncio.Event()
        # First come, first served.
        self._queue = asyncio.Lock()
        # Names differ from an earlier process's, whose adapters an attached server may hold.
        self._token = secrets.token_hex(3)
        self._loads = 0

    @property
    def names(self) -> frozenset[str]:
        """The adapters, and those that are being loaded."""
        return frozenset(self._names)

    def restart(self, limit: int | None) -> None:
        """Begin with a server that holds no adapter. Whoever waits for the former one fails."""
        self.limit = limit
        self._names.clear()
        self._incarnation += 1
        self._changed.set()

    async def take(self, ref: common_pb.WeightsRef, waits: Callable[[str], None]) -> str:
        """Return the name of an adapter that is about to be loaded, once there is a slot.
        `waits(reason)` is called before a wait.

        Raises `UpdateFailed` after `SLOT_SECONDS`, and `ServerGone`.
        """
        async with self._queue:
            incarnation = self._incarnation
            if self._full:
                waits(f"all {self.limit} slots for adapters have turns: {self._described}")
            try:
                async with asyncio.timeout(SLOT_SECONDS):
                    while self._full:
                        self._changed.clear()
                        await self._changed.wait()
                        if incarnation != self._incarnation:
                            raise ServerGone("it was lost while an adapter waited for a slot")
            except TimeoutError as error:
                raise update_failed(
                    ref,
                    f"no slot for its adapter within {SLOT_SECONDS:g} s; held: {self._described}",
                    remedy="Start the server with more slots for adapters, or shorten turns.",
                ) from error
            self._loads += 1
            name = f"{ref.policy}@{ref.version}.{self._token}{self._loads}"
            self._names.add(name)
            return name

    def free(self, name: str) -> None:
        """Take back the slot of an adapter that the server no longer holds. Repeatable."""
        self._names.discard(name)
        self._changed.set()

    @property
    def _full(self) -> bool:
        return self.limit is not None and len(self._names) >= self.limit

    @property
    def _described(self) -> str:
        return ", ".join(sorted(name.rpartition(".")[0] for name in self._names))


class AdapterVersions:
    """The adapters of one policy in a server: which one new turns use, and when an old one is
    unloaded."""

    def __init__(self, server: ManagedServer, slots: AdapterSlots) -> None:
        """`slots`: the server's, which all policies on it have in common."""
        self._server, self._slots = server, slots
        self._now = ServedAdapter()
        # Turns that use an adapter, by its name.
        self._turns: Counter[str | None] = Counter()
        # Version and proof of each adapter that the server holds.
        self._held: dict[str, tuple[common_pb.WeightsRef, Proof]] = {}
        # Adapters that are being verified, for the next `switch`: they have no turns yet.
        self._coming: set[str] = set()
        self._unloading: dict[str, asyncio.Task[None]] = {}
        # Adapters that the server has lost or computes wrongly, until they are unloaded.
        self._lost: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        """Adapters that the server holds, as far as is known."""
        return frozenset(self._held) - self._lost

    @property
    def now(self) -> ServedAdapter:
        """Adapter and version of new turns."""
        return self._now

    @property
    def live(self) -> list[int]:
        """Versions that turns use, now or from now on."""
        live = {ref.version for ref, _ in self._held.values()}
        return sorted(live | ({self._now.version} if self._now.version is not None else set()))

    def forget(self, *, restarted: bool = False) -> None:
        """The server has released its memory, or was `restarted`: nothing in it is verified."""
        self._now = ServedAdapter()
        self._turns.clear()
        if restarted:
            for task in self._unloading.values():
                task.cancel()
            self._held.clear()
            self._coming.clear()
            self._unloading.clear()
            self._lost.clear()

    def begin(self) -> ServedAdapter:
        """The adapter and version that a new turn is generated with; `ended` has to follow."""
        self._turns[self._now.name] += 1
        return self._now

    def ended(self, served: ServedAdapter) -> None:
        """A turn no longer uses its adapter, which is unloaded if it was its last one."""
        if self._turns[served.name] > 0:  # else the server was restarted meanwhile
            self._turns[served.name] -= 1
        if self._now.version is not None:  # else it sleeps, or is about to
            self._unload_unused()

    async def load(
        self, adapted: Adapted, ref: common_pb.WeightsRef, waits: Callable[[str], None]
    ) -> ServedAdapter:
        """Load and verify a version; turns use it after `switch`. `waits`: see
        `AdapterSlots.take`.

        Raises `UpdateFailed` and the client's errors.
        """
        server, content = self._server, adapted.adapter
        if self._now.version is None:
            await self.unload_all()  # what was loaded before the server slept
        name = await self._slots.take(ref, waits)
        try:
            await server.api.load_adapter(name, content, shared=server.launched)
        except BaseException as error:
            self._slots.free(name)
            if isinstance(error, SERVER_ERRORS) and not isinstance(error, ServerGone):
                raise _refused(server, ref, name, str(error)) from error
            raise
        try:
            proof = await server.updater.proof_of(ref, adapted.base.tensors, content)
            self._held[name] = ref, proof
            self._coming.add(name)
            await prove(server.api, proof, ref, adapter=name)
        except MergeMismatch as error:
            await self._unload(name)
            raise refused_adapter(str(error), ref.key) from error
        except BaseException:
            await self._unload(name)
            raise
        return ServedAdapter(name, ref.version)

    async def switch(self, served: ServedAdapter) -> None:
        """Have new turns use `served`; versions without turns are unloaded."""
        self._now = served
        self._coming.discard(served.name or "")
        self._unload_unused()
        await self.settled()

    async def holds(self, served: ServedAdapter) -> bool:
        """Return whether the server still computes with an adapter that turns use. Raises
        `ServerGone` and `BrokenReply`."""
        if served.name is None or served.name not in self.names:
            return False
        ref, proof = self._held[served.name]
        try:
            await prove(self._server.api, proof, ref, adapter=served.name)
        except UpdateFailed:
            return False
        return True

    def lost(self, served: ServedAdapter) -> None:
        """Note that the server has lost an adapter, or computes it wrongly."""
        if served.name is not None and served.name in self._held:
            self._lost.add(served.name)

    async def drop(self, served: ServedAdapter) -> None:
        """Unload an adapter that is `lost`. Its turns have ended: servers wait for them."""
        if served.name is None or served.name not in self._lost:
            return
        if served.name not in self._unloading:
            self._start_unloading(served.name)
        await asyncio.wait([self._unloading[served.name]])

    async def unload_all(self) -> None:
        """Unload every adapter: no turn uses one."""
        await self.settled()
        for name in list(self._held):
            await self._unload(name)

    async def settled(self) -> None:
        """Wait until no adapter is being unloaded."""
        if self._unloading:
            await asyncio.wait(list(self._unloading.values()))

    def _unload_unused(self) -> None:
        for name in sorted(self._held):
            used = name == self._now.name or name in self._coming or self._turns[name] > 0
            if not used and name not in self._unloading:
                self._start_unloading(name)

    def _start_unloading(self, name: str) -> None:
        task = asyncio.create_task(self._unload(name), name=f"unload-{name}")
        self._unloading[name] = task
        task.add_done_callback(partial(self._unloaded, name))

    def _unloaded(self, name: str, _: asyncio.Task[None]) -> None:
        self._unloading.pop(name, None)

    async def _unload(self, name: str) -> None:
        try:
            await self._server.api.unload_adapter(name)
        except Refused as error:  # the server does not hold it
            log.warning("adapter %s was not unloaded: %s", name, error)
        except SERVER_ERRORS as error:
            # Costs a slot; the next turn that ends, or `switch`, tries again.
            log.warning("adapter %s stays in the server: %s", name, error)
            return
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._slots.free(name)
        self._held.pop(name, None)
        self._coming.discard(name)
        self._lost.discard(name)
        del self._turns[name]


def _refused(server: ManagedServer, ref: common_pb.WeightsRef, name: str, reason: str) -> Exception:
    return update_failed(
        ref,
        f"LoRA adapter '{name}': {reason}",
        remedy=f"Launch the server with {server.adapter_arguments}.",
    )
