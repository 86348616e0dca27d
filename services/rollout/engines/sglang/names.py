"""Whether a server takes every tensor that is published: loaders skip names that they do not know.

SGLang's loaders ignore unknown names without a word, and a server that was launched without weights
(`--load-format dummy`) then serves random ones in their place. A forward pass of a prompt does not
show all of that: of a mixture it meets a few experts, and bfloat16 leaves room for small mistakes.

So each kind of tensor is tried once per server: a layer of every sort is loaded again with one kind
of its tensors altered, and what the server has must change. Its own checksum says so where it can
compute one, else the log-probs of a prompt. Then the layer is put back.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from services.rollout.engines.sglang.client import Refused, SglangClient
from services.rollout.engines.sglang.loading import (
    Loader,
    Plain,
    largest_difference,
    served_logprobs,
    update_failed,
)
from troupe.v1 import common_pb2 as pb

log = logging.getLogger(__name__)

# How far a tensor is altered, in units of its own size. Some (a bias of routing) need much.
_STEPS: Final = (1.0, 40.0)
# A kind that changes no log-prob by more than this in a plain forward pass cannot be told.
_EFFECT: Final = 1e-3
# Of a prime length, so that rows differ whatever theirs is.
_SIGNS: Final = torch.where(
    torch.rand(1_000_003, generator=torch.Generator().manual_seed(0)) < 0.5, -1.0, 1.0
)
# Log-probs of the same request and weights are closer than this, and those of others are not.
_NOISE: Final = 1e-5


@dataclass(frozen=True)
class _Kind:
    """Tensors of one kind in one layer, and all that have to be loaded with them: loaders may wait
    for a second one before they use the first."""

    name: str
    tensors: tuple[str, ...]
    together: tuple[str, ...]


class NamesCheck:
    """Tries the kinds of published tensors on one server."""

    def __init__(self, client: SglangClient, loader: Loader, plain: Plain) -> None:
        """`plain`: computes here what the server computes."""
        self._client, self._loader, self._plain = client, loader, plain
        # Names that the server is known to take.
        self._taken: frozenset[str] = frozenset()
        self._digest = client.weights_digest

    async def run(self, tensors: Mapping[str, torch.Tensor], ref: pb.WeightsRef) -> None:
        """Raise `UpdateFailed` for a kind of `tensors`, which the server holds and which serve no
        turn yet, that it does not take. Raises the client's errors but `Refused`."""
        if self._taken == tensors.keys():
            return
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._digest = functools.partial(self._client.weights_digest, num_bytes)
        before = await self._fingerprint()
        ignored: list[_Kind] = []
        try:
            for kind in _kinds(tensors):
                taken = await self._takes(kind, tensors, ref, before)
                ignored += [] if taken else [kind]
        except Refused as error:
            # It loads whole models alone. That what it serves is right is proven by a prompt.
            log.warning("%s cannot be asked which names it takes: %s", self._client.url, error)
        after = await self._fingerprint()
        if not _same(before, after):
            raise update_failed(ref, "it does not serve what was put back after a check of names")
        for kind in ignored:
            if await asyncio.to_thread(self._matters, kind, tensors):
                raise _not_taken(ref, kind)
            log.info("%s: %s changes nothing", self._client.url, kind.name)
        self._taken = frozenset(tensors)

    async def _takes(
        self,
        kind: _Kind,
        tensors: Mapping[str, torch.Tensor],
        ref: pb.WeightsRef,
        before: Fingerprint,
    ) -> bool:
        """Whether the server's weights change with those of `kind`; they are put back."""
        own = {name: tensors[name] for name in kind.together}
        for step in _STEPS:
            altered = own | _altered(kind, tensors, step)
            try:
                await self._loader.put(self._client, altered, ref.version)
                await self._client.flush_cache()
                now = await self._fingerprint()
            finally:
                await self._loader.put(self._client, own, ref.version)
                await self._client.flush_cache()
            if not _same(before, now):
                return True
        return False

    def _matters(self, kind: _Kind, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether a forward pass here changes with `kind`."""
        wanted = self._plain.logprobs(tensors)
        return any(
            not largest_difference(
                self._plain.logprobs(ChainMap(_altered(kind, tensors, step), dict(tensors))), wanted
            )
            <= _EFFECT
            for step in _STEPS
        )

    async def _fingerprint(self) -> Fingerprint:
        """The server's checksum of its weights, else what it says of a prompt."""
        digest = await self._digest()
        if digest is not None:
            return digest
        return await served_logprobs(self._client, self._plain.ids, "names")


Fingerprint = str | list[float]


def _same(these: Fingerprint, those: Fingerprint) -> bool:
    if isinstance(these, str) or isinstance(those, str):
        return these == those
    return largest_difference(these, those) <= _NOISE


def _kinds(tensors: Mapping[str, torch.Tensor]) -> Iterator[_Kind]:
    """Every kind of tensor once: in the first layer of each sort, or outside all layers."""
    layers: dict[str, dict[str, list[str]]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            kinds = layers.setdefault(_layer(name), {})
            kinds.setdefault(_kind(name), []).append(name)
    for name in [found for kind in layers.pop("", {}).values() for found in kind]:
        yield _Kind(name, (name,), (name,))
    known: set[str] = set()
    for kinds in layers.values():
        together = tuple(name for names in kinds.values() for name in names)
        for kind, names in kinds.items():
            if kind not in known:
                known.add(kind)
                yield _Kind(kind, tuple(names), together)


def _layer(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `model.layers.3`; empty outside layers."""
    parts = name.split(".")
    at = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def _kind(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _altered(
    kind: _Kind, tensors: Mapping[str, torch.Tensor], step: float
) -> dict[str, torch.Tensor]:
    return {name: _moved(tensors[name], step) for name in kind.tensors}


def _moved(tensor: torch.Tensor, step: float) -> torch.Tensor:
    """`tensor` plus or minus as much as it is large: also of a constant, or of zeros, something
    else. A regular pattern would do: but one that is the same in every row changes no softmax."""
    count = max(tensor.numel(), 1)
    size = float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) / count**0.5
    moved = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    for part in torch.split(moved.view(-1), len(_SIGNS)):
        part += (max(size, 0.1) * step * _SIGNS[: len(part)]).to(part.dtype)
    return moved


def _not_taken(ref: pb.WeightsRef, kind: _Kind) -> Exception:
    return update_failed(
        ref,
        f"the server does not take '{kind.name}' (for example '{kind.tensors[0]}'): what it serves "
        "stays the same whatever is published under these names",
        remedy="Use a release of SGLang that loads this model's checkpoints "
        "(`policies.X.engine.python`, or `urls`), or `kind: embedded`.",
    )
