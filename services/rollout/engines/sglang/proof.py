"""The proof that published weights are in a server: it says of a prompt what they say."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PretrainedConfig

from services.rollout.engines.errors import UpdateFailed
from services.rollout.engines.models import skeleton
from services.rollout.engines.sglang.client import BrokenReply, Refused, SglangClient
from services.rollout.engines.sglang.replies import prompt_logprobs
from troupe.v1 import common_pb2 as pb

# Prompt of the proof: long enough that every layer matters, short enough for a CPU forward pass.
_PROBE_TOKENS: Final = 16
# Largest difference of a prompt log-prob between the server and a plain forward pass of the same
# weights. float32 agrees to 1e-5; bfloat16 rounds to 3 digits, and kernels round differently.
_TOLERANCE: Final = {"float32": 2e-3, "bfloat16": 0.5}
# Above this, reading all weights once for the proof would take seconds.
_PROBE_BYTES: Final = 16 << 30


@dataclass(frozen=True)
class Proof:
    """A prompt, and what a plain forward pass over weights says of it."""

    ids: list[int]
    # Log-probs of `ids[1:]`.
    wanted: list[float]
    allowed: float

    @classmethod
    def of(
        cls, tensors: Mapping[str, torch.Tensor], config: PretrainedConfig, dtype: str, policy: str
    ) -> Proof:
        """Of `tensors`, which are not copied."""
        text = config.get_text_config()
        ids = _probe_ids(text.vocab_size, getattr(text, "max_position_embeddings", 64) // 2)
        model = skeleton(config, dtype, policy)
        model.load_state_dict(dict(tensors), strict=False, assign=True)
        model.tie_weights()
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
        table = torch.log_softmax(logits, dim=-1)
        wanted = table.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()
        return cls(ids, wanted, _TOLERANCE[dtype])

    async def check(
        self, client: SglangClient, ref: pb.WeightsRef, *, adapter: str | None = None
    ) -> None:
        """Raise `UpdateFailed` unless the server (with `adapter`) says the same; `BrokenReply` and
        `ServerGone`."""
        sampling: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0.0}
        rid = f"probe-{adapter or f'{ref.policy}-{ref.version}'}-{time.monotonic_ns()}"
        try:
            meta = await client.generate(rid, self.ids, sampling, logprobs_from=0, adapter=adapter)
        except Refused as error:
            raise update_failed(ref, f"the probe was refused: {error}") from error
        got = prompt_logprobs(meta)
        if len(got) != len(self.wanted):
            raise BrokenReply(f"{len(got)} log-probs for a probe of {len(self.ids)} tokens")
        # (What is no number is the worst.)
        worst = float((torch.tensor(got) - torch.tensor(self.wanted)).abs().max())
        if not worst <= self.allowed:
            raise update_failed(
                ref,
                f"prompt log-probs differ by {worst:.3g} from those of the published weights "
                f"(allowed: {self.allowed:g})",
            )


def too_large(num_bytes: int) -> bool:
    """Whether weights of this size go without a proof."""
    return num_bytes > _PROBE_BYTES


def update_failed(ref: pb.WeightsRef, reason: str) -> UpdateFailed:
    """The error of an update that did not get into the server."""
    return UpdateFailed(
        f"version {ref.version} did not get into the server: {reason}",
        field="weights",
        value=ref.key,
        remedy="Repeat the update; if it fails again restart the engine.",
    )


def _probe_ids(vocabulary: int, room: int) -> list[int]:
    """A fixed prompt that spreads over the vocabulary."""
    return [(7919 * i + 3) % vocabulary for i in range(min(_PROBE_TOKENS, room))]
