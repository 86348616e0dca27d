"""Rows side by side in one sequence, without padding, each attending to itself only.

Everything but attention works token by token and sees T tokens, no more. Attention is computed
in *blocks* of rows of similar lengths. A row may begin with tokens of an earlier row (a group
answers one prompt; a later turn repeats the earlier ones): those are computed once, and the
row's own tokens, its *fresh* ones, attend to them where they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from services.trainer.rows import Ints

# Rows whose lengths differ by less than this, or a quarter, are one block of attention.
_CLOSE = 16


@dataclass(frozen=True)
class Segment:
    """One row in a packed sequence."""

    # Where in the sequence its tokens are, in their order: int64 [length].
    path: Ints
    # How many of them are its own: the last ones, which lie side by side.
    fresh: int

    @property
    def shared(self) -> int:
        """Tokens that an earlier row computes."""
        return len(self.path) - self.fresh


@dataclass(frozen=True)
class Block:
    """n rows of attention: Q queries each, the fresh tokens, and K keys, all of them."""

    # int64 [n * Q], [n * K]: tokens, where rows are shorter the last one again.
    queries: torch.Tensor
    keys: torch.Tensor
    # n, Q, K
    shape: tuple[int, int, int]
    # bool [n, 1, Q, K] (True: attends to), or None: causal, Q == K.
    mask: torch.Tensor | None
    # int64 [n]: position of each row's first query.
    first: torch.Tensor
    # First token, if queries and keys are these: start, start + 1, ... without any gap.
    start: int | None

    def to(self, device: torch.device) -> Block:
        """The same on `device`."""
        mask = None if self.mask is None else self.mask.to(device, non_blocking=True)
        queries, keys, first = (
            t.to(device, non_blocking=True) for t in (self.queries, self.keys, self.first)
        )
        return Block(queries, keys, self.shape, mask, first, self.start)

    def mask_within(self, window: int) -> torch.Tensor | None:
        """The mask of a layer that looks back over at most `window` tokens, its own included."""
        _, queries, keys = self.shape
        if keys <= window:
            return self.mask
        device = self.queries.device
        q = self.first[:, None] + torch.arange(queries, device=device)
        k = torch.arange(keys, device=device)
        distance = (q[:, :, None] - k)[:, None]
        return (distance >= 0) & (distance < window)


@dataclass(frozen=True)
class Packing:
    """How the T tokens of a packed sequence attend to each other."""

    blocks: tuple[Block, ...]
    # int64 [T]: where in the blocks' outputs, one behind the other, each token is; or None: there.
    place: torch.Tensor | None
    # By row, for kernels that take sequences of any lengths: fresh tokens, all tokens.
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    # int64 [sum of key_lengths]: the tokens of each row's keys, row after row.
    paths: torch.Tensor
    # What attention made of it for a layer of one kind, for the other layers of that kind.
    made: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Packing:
        """The packing of rows whose fresh tokens follow each other in this order."""
        blocks, places, offset = [], np.empty(sum(s.fresh for s in segments), np.int64), 0
        for members in _similar(segments):
            block, own, slots = _block([segments[i] for i in members])
            places[own] = offset + slots
            offset += block.shape[0] * block.shape[1]
            blocks.append(block)
        ordered = offset == len(places) and bool((np.diff(places) == 1).all())
        return cls(
            tuple(blocks),
            None if ordered else torch.from_numpy(places),
            tuple(s.fresh for s in segments),
            tuple(len(s.path) for s in segments),
            torch.from_numpy(np.concatenate([s.path for s in segments])),
        )

    def to(self, device: torch.device) -> Packing:
        """The same on `device`."""
        place = None if self.place is None else self.place.to(device, non_blocking=True)
        return Packing(
            tuple(block.to(device) for block in self.blocks),
            place,
            self.query_lengths,
            self.key_lengths,
            self.paths.to(device, non_blocking=True),
        )

    @cached_property
    def cumulative(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each row's queries and keys begin, and the end: int32 [rows + 1] each."""
        device = self.paths.device
        found = []
        for lengths in (self.query_lengths, self.key_lengths):
            edges = np.cumsum([0, *lengths], dtype=np.int32)
            found.append(torch.from_numpy(edges).to(device, non_blocking=True))
        return found[0], found[1]


def _similar(segments: Sequence[Segment]) -> list[list[int]]:
    """Indices of rows that are of nearly the same lengths, longest first."""

    def size(i: int) -> tuple[bool, int, int]:
        return segments[i].shared > 0, len(segments[i].path), segments[i].fresh

    order = sorted(range(len(segments)), key=lambda i: (size(i)[0], -size(i)[1], -size(i)[2], i))
    found: list[list[int]] = []
    for i in order:
        if found:
            kind, length, fresh = size(found[-1][0])
            other, shorter, fewer = size(i)
            close = length - shorter <= max(_CLOSE, length // 4)
            if kind == other and close and abs(fresh - fewer) <= max(_CLOSE, fresh // 4):
                found[-1].append(i)
                continue
        found.append([i])
    return [sorted(members) for members in found]


def _block(rows: Sequence[Segment]) -> tuple[Block, Ints, Ints]:
    """A block of rows, their fresh tokens, and where in the [n * Q] of the block those are."""
    n, width = len(rows), max(row.fresh for row in rows)
    depth = max(row.shared for row in rows)
    length = width if not depth else max(len(row.path) for row in rows)
    queries, keys = np.empty((n, width), np.int64), np.empty((n, length), np.int64)
    slots: list[Ints] = []
    for b, row in enumerate(rows):
        own = row.path[row.shared :]
        queries[b, : row.fresh], queries[b, row.fresh :] = own, own[-1]
        keys[b, : len(row.path)], keys[b, len(row.path) :] = row.path, own[-1]
        slots.append(np.arange(b * width, b * width + row.fresh))
    first = np.array([row.shared for row in rows])
    mask = None
    if depth:
        mask = np.arange(length) <= first[:, None, None] + np.arange(width)[:, None]
    flat = queries.reshape(-1)
    dense = not depth and bool((np.diff(flat) == 1).all())
    block = Block(
        torch.from_numpy(flat),
        torch.from_numpy(keys.reshape(-1)),
        (n, width, length),
        None if mask is None else torch.from_numpy(mask[:, None]),
        torch.from_numpy(first),
        int(flat[0]) if dense else None,
    )
    return block, np.concatenate([row.path[row.shared :] for row in rows]), np.concatenate(slots)
