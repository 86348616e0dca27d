"""Versions of one policy's adapter in one server: the newest serves, older ones end their turns.

The base is loaded like any weights, once. A new version is one more adapter, loaded under a name of
its own while the server goes on; turns in hand end with the version that they began with.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from services.rollout.engines.adapted import Adapted
from services.rollout.engines.base import Adapter
from services.rollout.engines.errors import AdapterRefused, UpdateFailed
from services.rollout.engines.sglang.adapters import Adapters
from services.rollout.engines.sglang.client import BrokenReply, Refused
from services.rollout.engines.sglang.loading import (
    PROBE_BYTES,
    TOLERANCE,
    expected_logprobs,
    probe_ids,
)
from services.rollout.engines.sglang.replies import prompt_logprobs
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
        self._model = spec.language_model
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
            raise _failed(ref, str(error)) from error
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
        """Compare prompt log-probs with a plain forward pass over base and adapter, merged."""
        if adapted.base.ref.num_bytes > PROBE_BYTES:
            return
        ids, wanted = await asyncio.to_thread(self._expected, adapted, ref)
        sampling: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0.0}
        rid = f"probe-{name}-{time.monotonic_ns()}"
        try:
            meta = await self._server.client.generate(
                rid, ids, sampling, logprobs_from=0, adapter=name
            )
        except Refused as error:
            raise _failed(ref, f"the probe was refused: {error}") from error
        got = prompt_logprobs(meta)
        if len(got) != len(wanted):
            raise BrokenReply(f"{len(got)} log-probs for a probe of {len(ids)} tokens")
        worst = max(abs(g - w) for g, w in zip(got, wanted, strict=True))
        allowed = TOLERANCE[self._model.dtype]
        if not math.isfinite(worst) or worst > allowed:
            raise _failed(
                ref,
                f"prompt log-probs differ by {worst:.3g} from those of base and adapter (allowed: "
                f"{allowed:g})",
            )

    def _expected(self, adapted: Adapted, ref: pb.WeightsRef) -> tuple[list[int], list[float]]:
        config = self._server.layout.config
        text = config.get_text_config()
        ids = probe_ids(text.vocab_size, getattr(text, "max_position_embeddings", 64) // 2)
        tensors, _ = adapted.merged(ref)
        return ids, expected_logprobs(tensors, config, self._model.dtype, ref.policy, ids)


def _failed(ref: pb.WeightsRef, reason: str) -> UpdateFailed:
    return UpdateFailed(
        f"version {ref.version} did not get into the server: {reason}",
        field="weights",
        value=ref.key,
        remedy="Repeat the update; if it fails again restart the engine.",
    )
