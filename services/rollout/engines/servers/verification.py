"""Verification that a server serves a published version.

By a `Proof` (troupe/checkpoints/proof.py): log-probs that the server must give a prompt. The
trainer's devices compute it; `LocalProofs` makes up for versions that came without one.
`NamesCheck`: whether the server takes every tensor that is published.

Loaders of servers skip names that they do not know without a word, and a server launched without
weights then serves random ones in their place. The proof does not show all of that: the prompt
meets a few experts of a mixture, and bfloat16 leaves room for small mistakes. So each kind of
tensor is tried once per server: a layer of every sort is loaded again with one kind of its tensors
altered, and the server's fingerprint must change. Then the layer is restored."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import ChainMap, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PretrainedConfig

from services.rollout.engines.errors import Refused, UpdateFailed
from troupe.checkpoints.adapters import AdapterContent, adapted
from troupe.checkpoints.proof import Proof, Prover, spread_ids
from troupe.v1 import common_pb2 as common_pb

log = logging.getLogger(__name__)

# A server's checksum of its weights, or its log-probs of a prompt.
Fingerprint = str | list[float]

# Prompt of the check of names: long enough that every layer matters.
_PROBE_TOKENS: Final = 16
# How far a tensor is altered, in units of its own size. Some (a bias of routing) need much.
_STEPS: Final = (1.0, 40.0)
# A kind that changes no log-prob by more than this in a plain forward pass cannot be detected.
_EFFECT: Final = 1e-3
# Of a prime length, so that rows differ whatever theirs is.
_SIGNS: Final = torch.where(
    torch.rand(1_000_003, generator=torch.Generator().manual_seed(0)) < 0.5, -1.0, 1.0
)
# Proofs that are kept: of a few policies the newest version each.
_MOST_PROOFS: Final = 8
# Log-probs of the same request and weights are closer than this; of other weights, they are not.
_NOISE: Final = 1e-5


class LocalProofs:
    """Proofs that are computed here, on the CPU, for a server's versions that came without one."""

    def __init__(self, config: PretrainedConfig) -> None:
        """`config`: of the policy's model."""
        self._config = config
        # A short prompt, for comparisons of a server with itself.
        self.ids = spread_ids(config, _PROBE_TOKENS)

    @functools.cached_property
    def _prover(self) -> Prover:
        return Prover(self._config)

    def logprobs(self, published: Mapping[str, torch.Tensor]) -> list[float]:
        """Log-probs of the short prompt after its first token, by published tensors, which fit.
        Blocking."""
        model = self._prover.reference
        found: list[float] = model.logprobs(model.arranged(published), self.ids).tolist()
        return found

    async def of(
        self, published: Mapping[str, torch.Tensor], checksum: str, adapter: AdapterContent | None
    ) -> Proof:
        """The proof of published tensors, whose checksum is `checksum`, also with an `adapter` over
        them. Of weights without one it is computed once for all engines of this process that load
        them: a forward pass reads every weight.

        Raises `MergeMismatch`.
        """
        if adapter is not None:
            return await asyncio.to_thread(self._prove, published, adapter)
        key = checksum, self._config.to_json_string()
        return await _PROOFS.of(key, lambda: self._prove(published, None))

    def _prove(
        self, published: Mapping[str, torch.Tensor], adapter: AdapterContent | None
    ) -> Proof:
        tensors = self._prover.reference.arranged(published)
        if adapter is None:
            return self._prover.prove(tensors, ())
        served = adapted(tensors, adapter, exact=False)
        return self._prover.prove(adapted(tensors, adapter), (), served=served)


class SharedProofs:
    """Proofs of published weights, each computed once."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Any, ...], Proof] = OrderedDict()
        # Those that are being computed, by event loop.
        self._tasks: dict[tuple[Any, ...], asyncio.Task[Proof]] = {}

    async def of(self, key: tuple[Any, ...], compute: Callable[[], Proof]) -> Proof:
        """The proof of `key`, which `compute` makes in a thread unless it is known."""
        if (known := self._known.get(key)) is not None:
            return known
        running = (asyncio.get_running_loop(), *key)
        task = self._tasks.get(running)
        if task is None:
            task = self._tasks[running] = asyncio.ensure_future(asyncio.to_thread(compute))
            task.add_done_callback(lambda _: self._tasks.pop(running, None))
        proof = await asyncio.shield(task)
        self._known[key] = proof
        while len(self._known) > _MOST_PROOFS:
            self._known.popitem(last=False)
        return proof


_PROOFS: Final = SharedProofs()


class NamesCheck:
    """Tries the kinds of published tensors on one server."""

    def __init__(
        self,
        reference: LocalProofs,
        server: str,
        put: Callable[[Mapping[str, torch.Tensor], int | None], Awaitable[None]],
        fingerprint: Callable[[int], Awaitable[Fingerprint]],
    ) -> None:
        """`server`: its name in logs. `put(tensors, version)` loads some tensors over the server's,
        which then are version `version`'s, or (None) no version's, and clears its caches.
        `fingerprint(num_bytes)` of the weights that it holds."""
        self._reference, self._server = reference, server
        self._put, self._fingerprint = put, fingerprint
        # Names that the server is known to take.
        self._taken: frozenset[str] = frozenset()
        # Whether another worker has checked the next ones, which serves them.
        self.trusted = False

    def knows(self, names: Collection[str]) -> bool:
        """Return whether the server is known to take tensors of these names."""
        return self.trusted or self._taken == set(names)

    async def run(self, tensors: Mapping[str, torch.Tensor], ref: common_pb.WeightsRef) -> None:
        """Raise `UpdateFailed` for a kind of `tensors` that the server does not take. It holds
        them, and serves no turn with them yet. Raises the server's errors but `Refused`."""
        if self.knows(tensors.keys()):
            return
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        before = await self._fingerprint(num_bytes)
        ignored: list[_Kind] = []
        try:
            for kind in _kinds(tensors):
                taken = await self._takes(kind, tensors, ref, before, num_bytes)
                ignored += [] if taken else [kind]
        except Refused as error:
            # It loads whole models alone. That it serves the right ones is proven by a prompt.
            log.warning("%s cannot be asked which names it takes: %s", self._server, error)
        after = await self._fingerprint(num_bytes)
        if not _same(before, after):
            raise update_failed(ref, "it does not serve what was put back after a check of names")
        for kind in ignored:
            if await asyncio.to_thread(self._matters, kind, tensors):
                raise _not_taken(ref, kind)
            log.info("%s: %s changes nothing", self._server, kind.name)
        self._taken = frozenset(tensors)

    async def _takes(
        self,
        kind: _Kind,
        tensors: Mapping[str, torch.Tensor],
        ref: common_pb.WeightsRef,
        before: Fingerprint,
        num_bytes: int,
    ) -> bool:
        """Whether the server's fingerprint changes with tensors of `kind`; they are restored."""
        own = {name: tensors[name] for name in kind.together}
        for step in _STEPS:
            try:
                await self._put(own | _altered(kind, tensors, step), None)
                now = await self._fingerprint(num_bytes)
            finally:
                await self._put(own, ref.version)
            if not _same(before, now):
                return True
        return False

    def _matters(self, kind: _Kind, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the reference's log-probs change with tensors of `kind`. Blocking."""
        wanted = self._reference.logprobs(tensors)
        for step in _STEPS:
            altered = ChainMap(_altered(kind, tensors, step), dict(tensors))
            if not largest_difference(self._reference.logprobs(altered), wanted) <= _EFFECT:
                return True
        return False


def update_failed(
    ref: common_pb.WeightsRef,
    reason: str,
    *,
    remedy: str = "Repeat the update; if it fails again restart the engine.",
) -> UpdateFailed:
    """The error of an update whose weights the server does not serve."""
    return UpdateFailed(
        f"version {ref.version} did not get into the server: {reason}",
        field="weights",
        value=ref.key,
        remedy=remedy,
    )


@dataclass(frozen=True)
class _Kind:
    """Tensors of one kind in one layer, and those that are loaded together with them: loaders may
    wait for a second tensor before they use the first."""

    name: str
    tensors: tuple[str, ...]
    together: tuple[str, ...]


def _same(these: Fingerprint, those: Fingerprint) -> bool:
    if isinstance(these, str) or isinstance(those, str):
        return these == those
    return largest_difference(these, those) <= _NOISE


def _kinds(tensors: Mapping[str, torch.Tensor]) -> Iterator[_Kind]:
    """Every kind of tensor once: in the first layer that has it, or outside all layers."""
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
    """`tensor` with noise of its own size: changes constants and zeros, too. The signs are random:
    a pattern that is the same in every row changes no softmax."""
    count = max(tensor.numel(), 1)
    size = float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) / count**0.5
    moved = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    for part in torch.split(moved.view(-1), len(_SIGNS)):
        part += (max(size, 0.1) * step * _SIGNS[: len(part)]).to(part.dtype)
    return moved


def _not_taken(ref: common_pb.WeightsRef, kind: _Kind) -> Exception:
    return update_failed(
        ref,
        f"the server does not take '{kind.name}' (for example '{kind.tensors[0]}'): what it serves "
        "stays the same whatever is published under these names",
        remedy="Use a release of the server that loads this model's checkpoints "
        "(`policies.X.engine.python`, or `urls`), or `kind: embedded`.",
    )


def largest_difference(these: list[float], those: list[float]) -> float:
    """Largest difference between log-probs of the same tokens; NaN if one of them is NaN."""
    return float((torch.tensor(these) - torch.tensor(those)).abs().max())
