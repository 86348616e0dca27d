"""Versions of a policy that are LoRA adapters, loaded into one server at the same time."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from services.rollout.engines.servers.interface import SERVER_ERRORS
from services.rollout.engines.servers.managed import ManagedServer
from services.rollout.engines.servers.update import prove
from services.rollout.engines.servers.verification import update_failed
from services.rollout.engines.weights import Adapted, refused_adapter
from troupe.checkpoints.adapters import MergeMismatch
from troupe.v1 import common_pb2 as common_pb

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedAdapter:
    """What turns are generated with: an adapter by the server's name and its version, or, both
    None, the plain weights, whose version the server reports."""

    name: str | None = None
    version: int | None = None


class AdapterVersions:
    """The adapters in one server: which one new turns use, and when an old one is unloaded."""

    def __init__(self, server: ManagedServer) -> None:
        self._server = server
        self._now = ServedAdapter()
        # Checksum of the base weights that the server holds, verified; empty: unknown.
        self.base = ""
        # Turns that use an adapter, by its name.
        self._turns: Counter[str | None] = Counter()
        self._names: set[str] = set()
        self._loads = 0

    @property
    def names(self) -> frozenset[str]:
        """Adapters that the server holds."""
        return frozenset(self._names)

    def forget(self, *, restarted: bool = False) -> None:
        """The server has released its memory, or was `restarted`: nothing in it is verified."""
        self._now, self.base = ServedAdapter(), ""
        self._turns.clear()
        if restarted:
            self._names.clear()

    def begin(self) -> ServedAdapter:
        """The adapter and version that a new turn is generated with; `ended` has to follow."""
        self._turns[self._now.name] += 1
        return self._now

    def ended(self, served: ServedAdapter) -> None:
        """A turn no longer uses its adapter."""
        self._turns[served.name] -= 1

    async def load(self, adapted: Adapted, ref: common_pb.WeightsRef) -> ServedAdapter:
        """Load and verify a version; turns use it after `switch`.

        Raises `UpdateFailed` and the client's errors.
        """
        self._loads += 1
        name = f"{ref.policy}@{ref.version}.{self._loads}"
        server, content = self._server, adapted.adapter
        if not server.described.takes_adapters:
            raise _refused(server, ref, name, "its release cannot load them while it runs")
        try:
            await server.api.load_adapter(name, content, shared=server.launched)
        except SERVER_ERRORS as error:
            raise _refused(server, ref, name, str(error)) from error
        self._names.add(name)
        try:
            proof = await server.updater.proof_of(ref, adapted.base.tensors, content)
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
        for name in sorted(self._names):
            if name != served.name and self._turns[name] <= 0:
                await self._unload(name)

    async def _unload(self, name: str) -> None:
        try:
            await self._server.api.unload_adapter(name)
        except SERVER_ERRORS as error:
            # Costs memory only; the next `switch` tries again.
            log.warning("adapter %s stays in the server: %s", name, error)
            return
        self._names.discard(name)
        del self._turns[name]


def _refused(server: ManagedServer, ref: common_pb.WeightsRef, name: str, reason: str) -> Exception:
    return update_failed(
        ref,
        f"LoRA adapter '{name}': {reason}",
        remedy=f"Launch the server with {server.adapter_arguments}.",
    )
