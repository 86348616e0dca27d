"""The proof that published weights are in a server: it says of a prompt what they say.

The forward pass here takes a layer at a time: of a model of any size no more is in memory than what
is published anyway and one layer in the form in which transformers computes with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from services.rollout.engines.errors import UpdateFailed
from services.rollout.engines.models import skeleton
from services.rollout.engines.sglang.client import BrokenReply, Refused, SglangClient
from services.rollout.engines.sglang.replies import prompt_logprobs
from troupe.checkpoints.format import ModelArrangement
from troupe.transfer import DeferredTensors
from troupe.v1 import common_pb2 as pb

# Prompt of the proof: long enough that every layer matters, short enough for a CPU forward pass.
_PROBE_TOKENS: Final = 16
# Largest difference of a prompt log-prob between the server and a plain forward pass of the same
# weights. float32 agrees to 1e-5; bfloat16 rounds to 3 digits, and kernels round differently.
_TOLERANCE: Final = {"float32": 2e-3, "bfloat16": 0.5}
# A server that is full answers the probe when one of its turns has ended.
_ANSWER_SECONDS: Final = 600.0


@dataclass(frozen=True)
class Proof:
    """A prompt, and what a plain forward pass over weights says of it."""

    ids: list[int]
    # Log-probs of `ids[1:]`.
    wanted: list[float]
    allowed: float

    async def check(
        self, client: SglangClient, ref: pb.WeightsRef, *, adapter: str | None = None
    ) -> None:
        """Raise `UpdateFailed` unless the server (with `adapter`) says the same; `BrokenReply` and
        `ServerGone`."""
        name = adapter or f"{ref.policy}-{ref.version}"
        try:
            got = await served_logprobs(client, self.ids, name, adapter=adapter)
        except Refused as error:
            raise update_failed(ref, f"the probe was refused: {error}") from error
        except TimeoutError as error:
            reason = f"the probe was not answered within {_ANSWER_SECONDS:g} s"
            raise update_failed(ref, reason) from error
        worst = largest_difference(got, self.wanted)
        if not worst <= self.allowed:
            raise update_failed(
                ref,
                f"prompt log-probs differ by {worst:.3g} from those of the published weights "
                f"(allowed: {self.allowed:g})",
            )


class Plain:
    """Computes with transformers, on the CPU, what a server of a model says of a fixed prompt."""

    def __init__(self, layout: PreTrainedModel, dtype: str, policy: str) -> None:
        """`layout`: the policy's model without weights, in `dtype`."""
        self._layout, self._dtype, self._policy = layout, dtype, policy
        text = layout.config.get_text_config()
        room = getattr(text, "max_position_embeddings", 64) // 2
        # They spread over the vocabulary.
        self.ids = [(7919 * i + 3) % text.vocab_size for i in range(min(_PROBE_TOKENS, room))]

    def proof(self, tensors: DeferredTensors) -> Proof:
        """Of `tensors`, by the names of the model itself. Blocking: all of them are read once."""
        return Proof(self.ids, self._forward(tensors), _TOLERANCE[self._dtype])

    def logprobs(self, published: Mapping[str, torch.Tensor]) -> list[float]:
        """Log-probs of the prompt after its first token, by published tensors, which fit."""
        return self._forward(self.in_model(published))

    def in_model(self, published: Mapping[str, torch.Tensor]) -> DeferredTensors:
        """Published tensors, which fit, by the names of the model itself."""
        return ModelArrangement.of(self._layout, published).arranged(published)

    def _forward(self, tensors: DeferredTensors) -> list[float]:
        """Each layer gets its weights when it is reached, and gives them back."""
        model = skeleton(self._layout.config, self._dtype, self._policy)
        if getattr(model.config, "_experts_implementation", None) is not None:
            # Others read every expert; a few are asked.
            model.set_experts_implementation("eager")
        by_layer: dict[str, list[int]] = {}
        for number, group in enumerate(tensors.groups):
            layers = {_layer_of(model, name) for name in group.layout}
            layer = layers.pop() if len(layers) == 1 else ""
            by_layer.setdefault(layer, []).append(number)
        slots = model.state_dict(keep_vars=True)
        for number in by_layer.pop("", []):
            _give(slots, tensors.made(number))
        for layer, numbers in by_layer.items():
            _lend(slots, model.get_submodule(layer), tensors, numbers)
        with torch.no_grad():
            logits = model(torch.tensor([self.ids]), use_cache=False).logits[0, :-1].float()
        table = torch.log_softmax(logits, dim=-1)
        said = torch.tensor(self.ids[1:]).unsqueeze(1)
        found: list[float] = table.gather(1, said).squeeze(1).tolist()
        return found


async def served_logprobs(
    client: SglangClient, ids: list[int], name: str, *, adapter: str | None = None
) -> list[float]:
    """What the server says of `ids[1:]`. Raises the client's errors, and TimeoutError."""
    sampling: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0.0}
    rid = f"probe-{name}-{time.monotonic_ns()}"
    async with asyncio.timeout(_ANSWER_SECONDS):
        meta = await client.generate(rid, ids, sampling, logprobs_from=0, adapter=adapter)
    got = prompt_logprobs(meta)
    if len(got) != len(ids) - 1:
        raise BrokenReply(f"{len(got)} log-probs for a probe of {len(ids)} tokens")
    return got


def largest_difference(these: list[float], those: list[float]) -> float:
    """Of log-probs of the same tokens; NaN where one of them is no number."""
    return float((torch.tensor(these) - torch.tensor(those)).abs().max())


def _layer_of(model: PreTrainedModel, name: str) -> str:
    """The module that a parameter is in and that is one of a list; empty: of none."""
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if part.isdigit() and isinstance(
            model.get_submodule(".".join(parts[:at])), torch.nn.ModuleList
        ):
            return ".".join(parts[: at + 1])
    return ""


def _lend(
    slots: Mapping[str, torch.Tensor],
    layer: torch.nn.Module,
    tensors: DeferredTensors,
    numbers: list[int],
) -> None:
    """Have `layer` its weights while it computes."""
    names = [name for number in numbers for name in tensors.groups[number].layout]
    before = {name: slots[name].data for name in names}

    def come(*_: Any) -> None:
        for number in numbers:
            _give(slots, tensors.made(number))

    def go(*_: Any) -> None:
        _give(slots, before)

    layer.register_forward_pre_hook(come)
    layer.register_forward_hook(go, always_call=True)


def _give(slots: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        slots[name].data = tensor


def update_failed(
    ref: pb.WeightsRef,
    reason: str,
    *,
    remedy: str = "Repeat the update; if it fails again restart the engine.",
) -> UpdateFailed:
    """The error of an update that did not get into the server."""
    return UpdateFailed(
        f"version {ref.version} did not get into the server: {reason}",
        field="weights",
        value=ref.key,
        remedy=remedy,
    )
