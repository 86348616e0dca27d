"""The LoRA adapters of one server."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.rollout.engines.base import Adapter
from services.rollout.engines.errors import AdapterRefused
from services.rollout.engines.sglang.client import BrokenReply, Refused, ServerGone
from services.rollout.engines.sglang.loading import payload, shared_payload
from services.rollout.engines.sglang.server import Server


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

    async def load(self, name: str, source: Path | Adapter) -> None:
        """Load an adapter, in place of one of the same name. Raises `AdapterRefused`."""
        features, client = self._server.features, self._server.client
        from_tensors = isinstance(source, Adapter)
        if not (features.adapter_tensors if from_tensors else features.adapters):
            raise self._refused(name, "its release cannot load them while it runs")
        await self.unload(name)
        try:
            if isinstance(source, Adapter):
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
