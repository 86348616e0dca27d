"""Brings a server to new weights without losing a turn, and proves that they are in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

import torch
from transformers import PreTrainedModel

from services.rollout.engines.base import UpdateFailed
from services.rollout.engines.sglang.client import Refused, SglangClient
from services.rollout.engines.sglang.features import Features
from services.rollout.engines.sglang.loading import Loader, Plain, Proof, update_failed
from services.rollout.engines.sglang.names import NamesCheck
from troupe.job import ModelSpec
from troupe.v1 import common_pb2 as pb

# Turns that were aborted to make room leave the server within this time.
_FLUSH_SECONDS: Final = 10.0


class Updater:
    """The update procedure of one server.

    Pause (turns go back to the server's queue) -> load -> flush -> name the version -> continue
    -> compare prompt log-probs with a plain forward pass over the published weights. The first time
    also: does the server take every name (`NamesCheck`)?
    """

    def __init__(
        self,
        client: SglangClient,
        features: Features,
        loader: Loader,
        model: ModelSpec,
        layout: PreTrainedModel,
        policy: str,
        *,
        keep: bool,
    ) -> None:
        """`layout`: the model without weights. `keep`: running turns go on after the update;
        otherwise they end."""
        self._keep = keep
        self._client = client
        self._features = features
        self._loader = loader
        self.plain = Plain(layout, model.dtype, policy)
        self._names = NamesCheck(client, loader, self.plain)

    async def run(
        self,
        tensors: Mapping[str, torch.Tensor],
        ref: pb.WeightsRef,
        *,
        changed: bool,
        gate: Callable[[bool], None],
    ) -> float:
        """Load and verify `tensors` (each tensor once); returns the seconds of the pause.

        `changed`: the server is known to hold other content now. `gate(False)` has our own turns
        held back, `gate(True)` lets them go. Raises `UpdateFailed` and the client's errors other
        than `Refused`; the server then generates again, with unknown weights.
        """
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        proof = await asyncio.to_thread(lambda: self.plain.proof(self.plain.in_model(tensors)))
        await self._loader.prepare(tensors, ref.version)
        before = await self._client.weights_digest(num_bytes) if changed else None
        began = time.monotonic()
        gate(False)
        try:
            await self._pause()
            try:
                await self._loader.load(self._client, ref.version)
                await self._flush()
                if self._features.version_call:
                    await self._client.set_version(str(ref.version))
            finally:
                if self._features.pause:
                    await self._client.resume()
            paused = time.monotonic() - began
        except Refused as error:
            raise update_failed(ref, str(error)) from error
        finally:
            gate(True)
        try:
            await self._verify(ref, proof, before, num_bytes)
        except UpdateFailed:
            # Names that it skips are the better reason.
            await self._names.run(tensors, ref)
            raise
        await self._names.run(tensors, ref)
        return paused

    async def _pause(self) -> None:
        if self._features.retract:
            await self._client.pause("retract" if self._keep else "abort")
            return
        if self._features.pause:
            await self._client.pause(None)
        # What was aborted is asked for again, with its tokens, when the gate opens.
        await self._client.abort_all()

    async def _flush(self) -> None:
        deadline = time.monotonic() + _FLUSH_SECONDS
        while True:
            try:
                await self._client.flush_cache()
                return
            except Refused:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.05)

    async def _verify(
        self, ref: pb.WeightsRef, proof: Proof, before: str | None, num_bytes: int
    ) -> None:
        named = (await self._client.model_info()).get("weight_version")
        if named is not None and named != str(ref.version):
            raise update_failed(ref, f"the server says that it serves version '{named}'")
        if before is not None and await self._client.weights_digest(num_bytes) == before:
            raise update_failed(ref, "the server's own checksum of its weights did not change")
        await proof.check(self._client, ref)
