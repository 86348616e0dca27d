"""The LoRA adapters of one server."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from services.rollout.engines.base import AdapterRefused, AdapterWeights
from services.rollout.engines.sglang.client import BrokenReply, Refused, ServerGone
from services.rollout.engines.sglang.loading import payload, shared_payload, update_failed
from services.rollout.engines.sglang.server import Server
from services.rollout.engines.weights import Adapted
from troupe.job import PolicySpec
from troupe.v1 import common_pb2 as pb


class Adapters:
    """Names that turns may use. A server that starts again has none."""

    def __init__(self, policy: str, server: Server) -> None:
        self._policy = policy
        self._server = server
        self._names: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        """Adapters that are loaded."""
        return frozenset(self._names)

    def forget(self) -> None:
        """The server started anew."""
        self._names.clear()

    async def load(self, name: str, source: Path | AdapterWeights) -> None:
        """Load an adapter, in place of one of the same name. Raises `AdapterRefused`."""
        features, client = self._server.features, self._server.client
        from_tensors = isinstance(source, AdapterWeights)
        if not (features.adapter_tensors if from_tensors else features.adapters):
            raise self._refused(name, "its release cannot load them while it runs")
        await self.unload(name)
        try:
            if isinstance(source, AdapterWeights):
                encode = shared_payload if self._server.launched else payload
                data = await asyncio.to_thread(encode, dict(source.tensors))
                await client.load_adapter_tensors(name, source.config, [data] * self._server.ranks)
            else:
                await client.load_adapter(name, str(source))
        except (ServerGone, BrokenReply, Refused) as error:
            raise self._refused(name, str(error)) from error
        self._names.add(name)

    async def unload(self, name: str) -> None:
        """Forget an adapter; unknown names are ignored. Raises `AdapterRefused`."""
        if name not in self._names:
            return
        try:
            await self._server.client.unload_adapter(name)
        except (ServerGone, BrokenReply, Refused) as error:
            raise self._refused(name, str(error)) from error
        self._names.discard(name)

    def _refused(self, name: str, reason: str) -> AdapterRefused:
        return AdapterRefused(
            f"LoRA adapter '{name}': {reason}",
            field=f"policies.{self._policy}.engine.launch",
            value=name,
            remedy="Launch the server with --enable-lora, --max-lora-rank and "
            "--lora-target-modules that cover the adapter.",
        )


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedAdapter:
    """What a turn is asked with. `name`: an adapter; None: the plain weights. `version`: the
    policy's, where an adapter of ours draws; None: the server says which."""

    name: str | None
    version: int | None = None


class AdapterVersions:
    """Which adapter a turn is given, and when one leaves the server."""

    def __init__(self, spec: PolicySpec, server: Server, adapters: Adapters) -> None:
        self._server = server
        self._adapters = adapters
        self._now: ServedAdapter | None = None
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

    def begin(self, adapter: str | None) -> ServedAdapter:
        """What a turn that wants `adapter` is asked with, to its end; `ended` has to follow."""
        if self._now is None or adapter is not None:
            return ServedAdapter(adapter)
        self._turns[self._now.name] += 1
        return self._now

    def ended(self, served: ServedAdapter) -> None:
        """A turn has no more use for its adapter."""
        if served.version is not None:
            self._turns[served.name] -= 1

    async def load(self, adapted: Adapted, ref: pb.WeightsRef) -> ServedAdapter:
        """Load and verify a version; it serves nobody before `switch`.

        Raises `UpdateFailed` and the client's errors.
        """
        self._loads += 1
        name = f"{ref.policy}@{ref.version}.{self._loads}"
        content = adapted.adapter
        try:
            await self._adapters.load(
                name, AdapterWeights(content.peft_config(), dict(content.tensors))
            )
        except AdapterRefused as error:
            raise update_failed(ref, str(error)) from error
        self._own.add(name)
        try:
            await self._verify(adapted, ref, name)
        except BaseException:
            await self._unload(name)
            raise
        return ServedAdapter(name, ref.version)

    async def switch(self, served: ServedAdapter) -> None:
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
