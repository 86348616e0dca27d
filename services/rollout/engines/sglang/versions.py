"""Versions of one policy's adapter in one server: the newest serves, older ones end their turns.

The base is loaded like any weights, once. A new version is one more adapter, loaded under a name of
its own while the server goes on; turns in hand end with the version that they began with.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass

from services.rollout.engines.adapted import Adapted
from services.rollout.engines.base import Adapter
from services.rollout.engines.errors import AdapterRefused
from services.rollout.engines.sglang.adapters import Adapters
from services.rollout.engines.sglang.proof import update_failed
from services.rollout.engines.sglang.server import Server
from troupe.job import PolicySpec
from troupe.v1 import common_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """What a turn is asked with. `name`: an adapter; None: the plain weights. `version`: the
    policy's, where an adapter of ours draws; None: the server says which."""

    name: str | None
    version: int | None = None


class AdapterVersions:
    """Which adapter a turn is given, and when one leaves the server."""

    def __init__(self, spec: PolicySpec, server: Server, adapters: Adapters) -> None:
        self._server = server
        self._adapters = adapters
        self._now: Served | None = None
        # Checksum of the base that the server holds, verified; empty: unknown.
        self.base = ""
        self._turns: Counter[str | None] = Counter()
        self._own: set[str] = set()
        self._loads = 0

    def forget(self) -> None:
        """The server was started anew, or has given its memory back: nothing in it counts."""
        self._now, self.base = None, ""
        self._turns.clear()
        self._own &= self._adapters.names

    def begin(self, adapter: str | None) -> Served:
        """What a turn that wants `adapter` is asked with, to its end; `ended` has to follow."""
        if self._now is None or adapter is not None:
            return Served(adapter)
        self._turns[self._now.name] += 1
        return self._now

    def ended(self, served: Served) -> None:
        """A turn has no more use for its adapter."""
        if served.version is not None:
            self._turns[served.name] -= 1

    async def load(self, adapted: Adapted, ref: pb.WeightsRef) -> Served:
        """Load and verify a version; it serves nobody before `switch`.

        Raises `UpdateFailed` and the client's errors.
        """
        self._loads += 1
        name = f"{ref.policy}@{ref.version}.{self._loads}"
        content = adapted.adapter
        try:
            await self._adapters.load(name, Adapter(content.peft_config(), dict(content.tensors)))
        except AdapterRefused as error:
            raise update_failed(ref, str(error)) from error
        self._own.add(name)
        try:
            await self._verify(adapted, ref, name)
        except BaseException:
            await self._unload(name)
            raise
        return Served(name, ref.version)

    async def switch(self, served: Served) -> None:
        """From now on turns begin with `served`; versions without turns leave the server."""
        self._now = served
        for name in sorted(self._own):
            if name != served.name and self._turns[name] <= 0:
                await self._unload(name)

    async def _unload(self, name: str) -> None:
        try:
            await self._adapters.unload(name)
        except AdapterRefused as error:  # it costs memory, nothing else; tried again next time
            log.warning("adapter %s stays in the server: %s", name, error)
            return
        self._own.discard(name)
        del self._turns[name]

    async def _verify(self, adapted: Adapted, ref: pb.WeightsRef, name: str) -> None:
        """By base and adapter, merged."""
        tensors = adapted.parts(self._server.layout, ref.key)
        proof = await asyncio.to_thread(self._server.updater.plain.proof, tensors)
        await proof.check(self._server.client, ref, adapter=name)
