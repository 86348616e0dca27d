"""LoRA adapters in the passes of a batcher: rows of one pass take different ones.

The base's product is computed once for all rows. A hook of each adapted layer adds scale x A^T B^T
to the rows of each adapter, which lie side by side: no row depends on the adapters of others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from troupe.checkpoints.adapters import AdapterContent


@dataclass(frozen=True, eq=False)
class RowAdapter:
    """An adapter as passes compute it: in float32, on the model's device.

    `pairs`: by the name of a layer, A^T [in, rank] and B^T [rank, out]. `scale`: alpha / rank.
    """

    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    scale: float

    @classmethod
    def of(cls, content: AdapterContent, device: torch.device) -> RowAdapter:
        """Return `content` on `device`; float32 tensors on the CPU are not copied."""
        pairs = {}
        for layer in content.modules:
            a, b = (side.to(device, torch.float32).T for side in content.pair(layer))
            pairs[layer] = (a, b)
        return cls(pairs, content.scale)

    @property
    def shape(self) -> tuple[tuple[str, int], ...]:
        """The layers and their ranks: adapters of one shape are computed by the same products."""
        return tuple((layer, a.shape[1]) for layer, (a, _) in sorted(self.pairs.items()))


@dataclass(eq=False)
class LiveVersion:
    """The weights that draw a turn: the model's (`adapter` None), or an adapter over them.

    `version` is recorded with each token. The version of the model's own weights changes when
    others are loaded; an adapter's does not. Keys and values belong to one such object. `drew` is
    called with the number of tokens of each pass, in the thread that computes.
    """

    drew: Callable[[int], None]
    version: int = -1
    adapter: RowAdapter | None = None


class RowSpan(NamedTuple):
    """So many successive rows of a pass, and the adapter that they take."""

    rows: int
    adapter: RowAdapter | None


class AdaptedLayers:
    """The layers of one model that compute adapters, each pass by its own plan (`passing`)."""

    def __init__(self, model: torch.nn.Module, *, deterministic: bool = False) -> None:
        """`deterministic`: products have the shape of the whole pass, so that a row's does not
        depend on how many rows take the same adapter."""
        self._model = model
        self._deterministic = deterministic
        self._hooked: set[str] = set()
        self._spans: Sequence[RowSpan] = ()
        self._sizes: list[int] = []

    def cover(self, layers: Iterable[str]) -> None:
        """Have these layers compute adapters. No pass is being computed. Repeatable."""
        for name in sorted(set(layers) - self._hooked):
            self._model.get_submodule(name).register_forward_hook(partial(self._add, name))
            self._hooked.add(name)

    @contextlib.contextmanager
    def passing(self, spans: Sequence[RowSpan]) -> Iterator[None]:
        """Compute one pass with the rows `spans`."""
        if any(span.adapter is not None for span in spans):
            self._spans, self._sizes = spans, [span.rows for span in spans]
        try:
            yield
        finally:
            self._spans = ()

    def _add(
        self, name: str, layer: torch.nn.Module, args: tuple[torch.Tensor, ...], output: Any
    ) -> torch.Tensor | None:
        if not self._spans:
            return None
        inputs = args[0].reshape(-1, args[0].shape[-1])
        sums = output.view(-1, output.shape[-1])
        if inputs.shape[0] != sum(self._sizes):
            raise RuntimeError(
                f"layer '{name}' computes {inputs.shape[0]} rows of a pass of {sum(self._sizes)}: "
                "which adapters they take is not known"
            )
        (self._add_fixed if self._deterministic else self._add_packed)(name, inputs, sums)
        return None

    def _add_packed(self, name: str, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        """Add each adapter to its own rows of `sums` [rows, out], rounded once."""
        given, own = torch.split(inputs, self._sizes), torch.split(sums, self._sizes)
        for (_, adapter), rows, added in zip(self._spans, given, own, strict=True):
            if adapter is None or (pair := adapter.pairs.get(name)) is None:
                continue
            inner = rows.to(torch.float32) @ pair[0]
            if added.dtype == torch.float32:
                added.addmm_(inner, pair[1], alpha=adapter.scale)
            else:
                added.copy_(added + (inner @ pair[1]).mul_(adapter.scale))

    def _add_fixed(self, name: str, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        """The same with products of all rows."""
        inputs = inputs.to(torch.float32)
        start = 0
        for rows, adapter in self._spans:
            own = slice(start, start + rows)
            start += rows
            if adapter is None or (pair := adapter.pairs.get(name)) is None:
                continue
            added = ((inputs @ pair[0]) @ pair[1]).mul_(adapter.scale)
            sums[own] = sums[own] + added[own]
