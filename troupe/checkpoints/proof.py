"""The proof that a server serves a version: log-probs of a fixed prompt.

Whoever has the weights computes them in float32 (`Prover`): the trainer on its devices, whose proof
travels with the version (`WeightsRef.proof`), or a reader of a version that came without one. The
server must give the same log-probs, but for the rounding of its own arithmetic (`Proof.check`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from google.protobuf.json_format import MessageToJson, Parse, ParseError

from troupe.checkpoints.reference import ReferenceModel
from troupe.transfer.deferred import DeferredTensors
from troupe.v1 import common_pb2 as common_pb

# Text whose log-probs depend on all of a model: names, numbers, quotations, references to the
# beginning. On random tokens a model is only surprised, and by rounding almost as much as by
# wrong weights.
PASSAGE: Final = (
    "The old harbour lies an hour north of the city. In the spring of 1874 a storm broke its outer "
    "wall, and the council asked three engineers for advice. The first wanted to build it again as "
    "it had been, from local stone. The second, who had worked in Holland, proposed a longer and "
    "lower wall, so that the waves would lose their force before they reached the boats. The third "
    "did not answer the question at all. She measured the depth of the water every morning for six "
    "weeks, drew a map, and showed that the sand was moving: within twenty years there would be no "
    'harbour left to protect. "You can pay for the wall," she wrote, "or for a railway, but the '
    'sea will not wait until you have paid for both." The council chose the railway.'
)
# Tokens of the prompt.
_PROMPT_TOKENS: Final = 128
# Tokens of a server's context that a prompt cannot have: SGLang 0.5.21 refuses prompts of more than
# its context less 6.
_RESERVED: Final = 8
# The prompt is of the passage if its tokens are different ones: this many times fewer at least.
_FEWEST_DIFFERENT: Final = 4
# How much more a server may differ than a plain forward pass in its dtype does.
_MARGIN: Final = 3.0
# Least difference of two float32 computations that is taken for granted.
_LEAST_ROUNDING: Final = 1e-5
# Versions for which a measured bound holds: training changes the effect of rounding slowly.
_MEASURED_EVERY: Final = 16
# Key of a proof in the metadata of a published state.
METADATA: Final = "proof"

# What a trainer proves: the tensors that it publishes, or the base under its adapter.
Proven = Literal["published", "base"]


class ProofFailed(ValueError):
    """A server's log-probs do not fit the weights that it is said to serve."""


@dataclass(frozen=True)
class Proof:
    """Log-probs that a server of some weights must give a prompt."""

    # Token ids of the prompt.
    ids: tuple[int, ...]
    # Log-probs of `ids[1:]`.
    logprobs: tuple[float, ...]
    # Largest mean difference that the rounding of a server explains.
    allowed: float

    @classmethod
    def of(cls, ref: common_pb.WeightsRef) -> Proof | None:
        """Return the proof that came with a version, if one did."""
        return cls.of_message(ref.proof) if ref.HasField("proof") else None

    @classmethod
    def of_message(cls, message: common_pb.WeightsProof) -> Proof:
        """Restore the result of `to_message`."""
        return cls(tuple(message.ids), tuple(message.logprobs), message.allowed)

    def to_message(self) -> common_pb.WeightsProof:
        """Return the proof as it travels with a version."""
        return common_pb.WeightsProof(ids=self.ids, logprobs=self.logprobs, allowed=self.allowed)

    @classmethod
    def of_text(cls, text: str) -> Proof:
        """Restore the result of `to_text`. Raises ValueError."""
        return cls.of_message(Parse(text, common_pb.WeightsProof()))

    def to_text(self) -> str:
        """Return the proof as JSON."""
        return MessageToJson(self.to_message(), indent=None)

    def within(self, max_context: int) -> Proof:
        """Return the proof for a server whose prompts and replies have `max_context` tokens."""
        fitting = max(max_context - _RESERVED, 2)
        return replace(self, ids=self.ids[:fitting], logprobs=self.logprobs[: fitting - 1])

    def check(self, found: Sequence[float]) -> None:
        """Raise ProofFailed unless the log-probs `found` by a server fit the weights."""
        if len(found) != len(self.logprobs):
            raise ProofFailed(f"{len(found)} log-probs of {len(self.logprobs)} tokens")
        mean = mean_difference(torch.tensor(found), torch.tensor(self.logprobs))
        if not mean <= self.allowed:  # also if it is not a number
            raise ProofFailed(
                f"prompt log-probs differ by {mean:.3g} on average from the published weights' "
                f"(rounding explains {self.allowed:.3g})"
            )


class Prover:
    """Proves the versions of one model."""

    def __init__(self, config: Any, device: torch.device | None = None) -> None:
        """Compute with a model of the transformers `config` on `device` (default: the CPU)."""
        self.reference = ReferenceModel(config, device)
        # By prompt and what is proven: the bound, and for how many proofs it still holds.
        self._bounds: dict[tuple[Any, ...], tuple[float, int]] = {}

    def prove(
        self,
        tensors: DeferredTensors,
        passage: Sequence[int],
        *,
        served: DeferredTensors | None = None,
        what: Proven = "published",
    ) -> Proof:
        """Return the proof of a model's `tensors`, by its own names. Blocking: reads all of them,
        and twice where the bound is measured, which lasts for several versions.

        `passage`: token ids of `PASSAGE`, or empty. `served`: the tensors as a server has them, if
        these are rounded versions of `tensors`.
        """
        reference, ids = self.reference, prompt_of(self.reference.config, passage)
        exact = reference.logprobs(tensors, ids)
        key = what, *ids
        allowed, left = self._bounds.get(key, (0.0, 0))
        if not left:
            rounded = reference.logprobs(served or tensors, ids, rounded=True)
            allowed = _MARGIN * max(mean_difference(exact, rounded), _LEAST_ROUNDING)
            left = _MEASURED_EVERY
        self._bounds[key] = allowed, left - 1
        return Proof(tuple(ids), tuple(exact.tolist()), allowed)


def mean_difference(these: torch.Tensor, those: torch.Tensor) -> float:
    """Return the mean absolute difference of log-probs; NaN if one of them is NaN."""
    return float((these - those).abs().mean())


def passage_ids(tokenizer: Any) -> list[int]:
    """Return the token ids of the passage; none without a tokenizer."""
    return [] if tokenizer is None else list(tokenizer.encode(PASSAGE))


def prompt_of(config: Any, passage: Sequence[int]) -> list[int]:
    """Return the prompt for a model: the passage, or, where its tokenizer knows no English or there
    is none, ids spread over the vocabulary."""
    text = config.get_text_config()
    room = getattr(text, "max_position_embeddings", None) or _PROMPT_TOKENS
    length = max(2, min(_PROMPT_TOKENS, room // 2))
    ids = list(passage[:length])
    if len(set(ids)) >= length // _FEWEST_DIFFERENT and max(ids) < text.vocab_size:
        return ids
    return spread_ids(config, length)


def spread_ids(config: Any, count: int) -> list[int]:
    """Return token ids spread over a model's vocabulary."""
    text = config.get_text_config()
    room = getattr(text, "max_position_embeddings", None) or count
    return [(7919 * i + 3) % text.vocab_size for i in range(max(2, min(count, room // 2)))]


def metadata_of(proof: Proof | None) -> dict[str, str]:
    """Return the metadata of a published state that carry its proof."""
    return {} if proof is None else {METADATA: proof.to_text()}


def proof_in(metadata: Mapping[str, str]) -> common_pb.WeightsProof | None:
    """Return the proof in the metadata of a published state; None if there is none, or none that
    this release reads."""
    with contextlib.suppress(ValueError, ParseError):
        if METADATA in metadata:
            return Proof.of_text(metadata[METADATA]).to_message()
    return None
