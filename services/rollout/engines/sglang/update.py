"""Brings a server to new weights without losing a turn, and proves that they are in."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from typing import Final

import torch
from transformers import PretrainedConfig

from services.rollout.engines.errors import UpdateFailed
from services.rollout.engines.sglang.client import BrokenReply, Refused, SglangClient
from services.rollout.engines.sglang.features import Features
from services.rollout.engines.sglang.loading import (
    PROBE_BYTES,
    TOLERANCE,
    Loader,
    expected_logprobs,
    probe_ids,
)
from services.rollout.engines.sglang.replies import prompt_logprobs
from troupe.job import ModelSpec
from troupe.v1 import common_pb2 as pb

# Turns that were aborted to make room leave the server within this time.
_FLUSH_SECONDS: Final = 10.0


class Updater:
    """The update procedure of one server.

    Pause (turns go back to the server's queue) -> load -> flush -> name the version -> continue
    -> compare prompt log-probs with a plain forward pass over the published weights.
    """

    def __init__(
        self,
        client: SglangClient,
        features: Features,
        loader: Loader,
        model: ModelSpec,
        config: PretrainedConfig,
        policy: str,
        *,
        keep: bool,
    ) -> None:
        """`keep`: running turns go on after the update; otherwise they end."""
        self._keep = keep
        self._client = client
        self._features = features
        self._loader = loader
        self._model = model
        self._config = config
        self._policy = policy

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
        expected = await asyncio.to_thread(self._expected, tensors)
        await self._loader.prepare(tensors, ref.version)
        before = await self._client.weights_digest() if changed else None
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
            raise _failed(ref, str(error)) from error
        finally:
            gate(True)
        await self._verify(ref, expected, before)
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

    def _expected(self, tensors: Mapping[str, torch.Tensor]) -> tuple[list[int], list[float]]:
        """The probe and its log-probs; empty for models too large for a forward pass here."""
        if sum(tensor.nbytes for tensor in tensors.values()) > PROBE_BYTES:
            return [], []
        text = self._config.get_text_config()
        ids = probe_ids(text.vocab_size, getattr(text, "max_position_embeddings", 64) // 2)
        dtype = self._model.dtype
        return ids, expected_logprobs(tensors, self._config, dtype, self._policy, ids)

    async def _verify(
        self, ref: pb.WeightsRef, expected: tuple[list[int], list[float]], before: str | None
    ) -> None:
        named = (await self._client.model_info()).get("weight_version")
        if named is not None and named != str(ref.version):
            raise _failed(ref, f"the server says that it serves version '{named}'")
        if before is not None and await self._client.weights_digest() == before:
            raise _failed(ref, "the server's own checksum of its weights did not change")
        ids, wanted = expected
        if not ids:
            return
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        rid = f"probe-{ref.policy}-{ref.version}-{time.monotonic_ns()}"
        try:
            meta = await self._client.generate(rid, ids, sampling, logprobs_from=0)
        except Refused as error:
            raise _failed(ref, f"the probe was refused: {error}") from error
        got = prompt_logprobs(meta)
        if len(got) != len(wanted):
            raise BrokenReply(f"{len(got)} log-probs for a probe of {len(ids)} tokens")
        worst = max(abs(g - w) for g, w in zip(got, wanted, strict=True))
        if not math.isfinite(worst) or worst > TOLERANCE[self._model.dtype]:
            raise _failed(
                ref,
                f"prompt log-probs differ by {worst:.3g} from those of the published weights "
                f"(allowed: {TOLERANCE[self._model.dtype]:g})",
            )


def _failed(ref: pb.WeightsRef, reason: str) -> UpdateFailed:
    return UpdateFailed(
        f"version {ref.version} did not get into the server: {reason}",
        field="weights",
        value=ref.key,
        remedy="Repeat the update; if it fails again restart the engine.",
    )
