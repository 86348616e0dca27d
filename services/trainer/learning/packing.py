"""Batching of rows into forward passes, within a budget of tokens.

*Packed*: rows are concatenated into one sequence without padding. With prefix sharing, rows with a
common prefix (a group answers one prompt; a later turn repeats the earlier ones) form a prefix
tree, whose common tokens are computed once. *Padded*, for models whose attention does not support
packing: rows of similar length, right-padded; causal attention never attends to the padding, so no
mask is needed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from services.trainer.learning.samples import Ints, Row

# Rows whose lengths differ by at most this, or a quarter, share a block of attention.
_CLOSE = 16
# Padded rows whose lengths differ by at most this, or a quarter, share a forward pass.
_BUCKET = 16


@dataclass(frozen=True)
class Segment:
    """One row in a packed sequence."""

    # int64 [length]: index in the sequence of each of the row's tokens.
    path: Ints
    # Number of fresh tokens, which only this row has: its last ones, adjacent in the sequence.
    fresh: int

    @property
    def shared(self) -> int:
        """Number of tokens that an earlier row of the sequence computes."""
        return len(self.path) - self.fresh


@dataclass(frozen=True)
class Block:
    """n rows that attention computes together: Q queries (fresh tokens) and K keys (all) each."""

    # int64 [n * Q], [n * K]: tokens of the sequence; shorter rows repeat their last one.
    queries: torch.Tensor
    keys: torch.Tensor
    # n, Q, K
    shape: tuple[int, int, int]
    # bool [n, 1, Q, K] (True: attends to), or None: causal, Q == K.
    mask: torch.Tensor | None
    # int64 [n]: position of each row's first query.
    first: torch.Tensor
    # The first token, if queries and keys are start, start + 1, ... without a gap; else None.
    start: int | None

    def mask_within(self, window: int) -> torch.Tensor | None:
        """The mask of a layer with a sliding window of `window` tokens, its own included."""
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
    """The attention structure of a packed sequence of T tokens."""

    blocks: tuple[Block, ...]
    # int64 [T]: where each token is in the concatenated outputs of the blocks; None: in order.
    place: torch.Tensor | None
    # Per row, for variable-length kernels: number of fresh tokens, of all tokens.
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    # int64 [sum of key_lengths]: the tokens of each row's keys, row after row.
    paths: torch.Tensor
    # Cache of attention.py: indices that one layer derived, for the other layers of its kind.
    made: dict[Hashable, Any] = field(init=False, default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Packing:
        """Make the packing of segments whose fresh tokens are concatenated in this order."""
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

    @cached_property
    def cumulative(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cumulative lengths of queries and of keys, int32 [rows + 1] each."""
        device = self.paths.device
        found = []
        for lengths in (self.query_lengths, self.key_lengths):
            edges = np.cumsum([0, *lengths], dtype=np.int32)
            found.append(torch.from_numpy(edges).to(device, non_blocking=True))
        return found[0], found[1]


def _similar(segments: Sequence[Segment]) -> list[list[int]]:
    """Indices of segments grouped by similar lengths, longest first."""

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
    """A block of rows, their fresh tokens, and the places of those in the block's [n * Q]."""
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


@dataclass(frozen=True)
class PackedBatch:
    """The input of one forward pass: B sequences of L tokens, N of which are scored."""

    # int64 [B, L]
    input_ids: torch.Tensor
    # int64 [N]: place in the flattened [B * L] of the token before each scored one.
    positions: torch.Tensor
    # int64 [N]: the scored tokens.
    targets: torch.Tensor
    # int64 [N]: index of each scored token among those of all rows, row after row.
    order: torch.Tensor
    # Number of scored tokens of each row; those of a row lie together.
    spans: tuple[int, ...] = ()
    # int64 [B, L], or None: 0 .. L-1 in every sequence.
    position_ids: torch.Tensor | None = None
    # Attention structure of a packed sequence; None: a padded batch.
    packing: Packing | None = None
    # int16 [B * L, layers, k]: the experts that engines sent each token to; negative where no row
    # says it; None: no row does.
    routes: torch.Tensor | None = None

    def to(self, device: torch.device) -> PackedBatch:
        """The same on `device`."""
        return PackedBatch(**_fields_on(self, device))


def _fields_on(part: Block | Packing | PackedBatch, device: torch.device) -> dict[str, Any]:
    """The fields of `part`, with all tensors on `device`."""
    return {f.name: _on(getattr(part, f.name), device) for f in fields(part) if f.init}


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Block | Packing):
        return type(value)(**_fields_on(value, device))
    if isinstance(value, tuple) and value and isinstance(value[0], Block):
        return tuple(_on(block, device) for block in value)
    return value


@dataclass(frozen=True)
class PassCosts:
    """Cost model of a forward pass in FLOPs: per token, and per pair of tokens in attention."""

    token: float
    pair: float

    def alone(self, length: int) -> float:
        """Cost of one row of `length` tokens by itself."""
        return self.token * length + self.pair * length * length / 2

    def joined(self, fresh: int, length: int) -> float:
        """Cost of the last `fresh` tokens of a row whose other tokens another row computes."""
        return self.token * fresh + self.pair * fresh * length


class _PrefixTree:
    """A prefix tree of rows, which are added in lexicographic order; a node per token."""

    def __init__(self) -> None:
        self._tokens: list[Ints] = []
        self._depths: list[Ints] = []
        self.size = 0
        # Per row: (its index, node of each of its tokens, how many nodes only it has).
        self.paths: list[tuple[int, Ints, int]] = []

    def add(self, index: int, tokens: Ints, common: int) -> None:
        """Add a row whose first `common` tokens are those of the row added before."""
        fresh = np.arange(self.size, self.size + len(tokens) - common)
        path = np.concatenate([self.paths[-1][1][:common], fresh]) if common else fresh
        self._tokens.append(tokens[common:])
        self._depths.append(np.arange(common, len(tokens)))
        self.size += len(fresh)
        self.paths.append((index, path, len(fresh)))

    @property
    def tokens(self) -> Ints:
        """Token id of each node."""
        return np.concatenate(self._tokens)

    @property
    def depths(self) -> Ints:
        """Position of each node in the rows through it."""
        return np.concatenate(self._depths)


def plan(
    rows: Sequence[Row],
    budget: int,
    *,
    packed: bool = True,
    sharing: PassCosts | None = None,
    limit: int | None = None,
) -> list[PackedBatch]:
    """Plan batches that together score every response token of `rows` exactly once.

    A batch has at most `budget` tokens, padding included, and scores at most `limit` of them
    (None: no bound), but always holds at least one sequence. With `sharing`, common prefixes of
    packed rows are computed once where these costs make that cheaper. Rows without response tokens
    are left out. Deterministic: depends on the order of `rows` only through ties.
    """
    starts = np.cumsum([0, *(row.response_length for row in rows)])
    chosen = [i for i, row in enumerate(rows) if row.response_length]
    # The last token of a row is scored, never an input.
    fed = {i: rows[i].ids[:-1] for i in chosen}
    if not packed:
        lone = [(len(fed[i]), rows[i].response_length) for i in chosen]
        parts = _bucket(lone, budget, limit, padded=True)
        return [_padded([chosen[k] for k in part], rows, fed, starts) for part in parts]
    if sharing is None:
        trees = _alone(fed)
    else:
        trees = _share(fed, {i: rows[i].response_length for i in chosen}, sharing, budget, limit)
    sizes = [(t.size, sum(rows[i].response_length for i, _, _ in t.paths)) for t in trees]
    parts = _bucket(sizes, budget, limit, padded=False)
    return [_packed([trees[k] for k in part], rows, starts) for part in parts]


def _bucket(
    sizes: list[tuple[int, int]], budget: int, limit: int | None, *, padded: bool
) -> list[list[int]]:
    """Indices of `sizes` (length, scored tokens) in groups within both bounds, longest first."""
    order = sorted(range(len(sizes)), key=lambda k: (-sizes[k][0], k))
    parts: list[list[int]] = []
    scored = total = 0
    for k in order:
        length, tokens = sizes[k]
        if parts:
            longest = sizes[parts[-1][0]][0]
            if padded:
                close = longest - length <= max(_BUCKET, longest // 4)
                fits = close and (len(parts[-1]) + 1) * longest <= budget
            else:
                fits = total + length <= budget
            if fits and (limit is None or scored + tokens <= limit):
                parts[-1].append(k)
                scored += tokens
                total += length
                continue
        parts.append([k])
        scored, total = tokens, length
    return parts


def _padded(
    part: list[int], rows: Sequence[Row], fed: dict[int, Ints], starts: Ints
) -> PackedBatch:
    length = max(len(fed[i]) for i in part)
    ids = np.zeros((len(part), length), np.int64)
    positions: list[Ints] = []
    for b, i in enumerate(part):
        ids[b, : len(fed[i])] = fed[i]
        first = b * length + rows[i].prompt_length - 1
        positions.append(np.arange(first, first + rows[i].response_length))
    places = [(i, b * length + np.arange(len(fed[i]))) for b, i in enumerate(part)]
    batch = _scoring(torch.from_numpy(ids), part, positions, rows, starts)
    return replace(batch, routes=_routes(ids.size, places, rows))


def _packed(part: list[_PrefixTree], rows: Sequence[Row], starts: Ints) -> PackedBatch:
    members: list[int] = []
    positions: list[Ints] = []
    segments: list[Segment] = []
    places: list[tuple[int, Ints]] = []
    offset = 0
    for tree in part:
        for i, path, fresh in tree.paths:
            members.append(i)
            places.append((i, path[len(path) - fresh :] + offset))
            segments.append(Segment(path + offset, fresh))
            positions.append(offset + path[rows[i].prompt_length - 1 :])
        offset += tree.size
    ids = np.concatenate([tree.tokens for tree in part])
    depths = np.concatenate([tree.depths for tree in part])
    return replace(
        _scoring(torch.from_numpy(ids[None]), members, positions, rows, starts),
        position_ids=torch.from_numpy(depths[None]),
        packing=Packing.of(segments),
        routes=_routes(offset, places, rows),
    )


def _routes(
    size: int, places: Sequence[tuple[int, Ints]], rows: Sequence[Row]
) -> torch.Tensor | None:
    """Routes of the `size` tokens of a batch. `places`: indices of rows, and where the last tokens
    that are fed of each are; a shared prefix is routed as in the row that was first there."""
    known = next((r for i, _ in places if (r := rows[i].routes) is not None), None)
    if known is None:
        return None
    routes = np.full((size, *known.shape[1:]), -1, np.int16)
    for i, at in places:
        if (own := rows[i].routes) is not None:
            routes[at] = own[len(own) - len(at) :]
    return torch.from_numpy(routes)


def _scoring(
    ids: torch.Tensor, members: list[int], positions: list[Ints], rows: Sequence[Row], starts: Ints
) -> PackedBatch:
    return PackedBatch(
        input_ids=ids,
        positions=_concatenate(positions),
        targets=_concatenate([rows[i].ids[rows[i].prompt_length :] for i in members]),
        order=_concatenate([np.arange(starts[i], starts[i + 1]) for i in members]),
        spans=tuple(rows[i].response_length for i in members),
    )


def _alone(fed: dict[int, Ints]) -> list[_PrefixTree]:
    trees = []
    for i, tokens in fed.items():
        trees.append(_PrefixTree())
        trees[-1].add(i, tokens, 0)
    return trees


def _share(
    fed: dict[int, Ints], scored: dict[int, int], costs: PassCosts, budget: int, limit: int | None
) -> list[_PrefixTree]:
    """Merge rows with long common prefixes into trees, greedily in lexicographic order."""
    # Big-endian bytes sort like the numbers: neighbours share the longest prefixes.
    order = sorted(fed, key=lambda i: (fed[i].astype(">i8").tobytes(), i))
    trees: list[_PrefixTree] = []
    targets = 0
    for previous, i in zip([-1, *order], order, strict=False):
        tokens = fed[i]
        common = _common_prefix(fed[previous], tokens) if previous >= 0 else 0
        # A row without fresh tokens still needs its last token as an input.
        fresh = max(len(tokens) - common, 1)
        fits = bool(trees) and trees[-1].size + fresh <= budget
        small = limit is None or targets + scored[i] <= limit
        cheaper = costs.joined(fresh, len(tokens)) <= costs.alone(len(tokens))
        if not (fits and small and cheaper and fresh < len(tokens)):
            fresh, targets = len(tokens), 0
            trees.append(_PrefixTree())
        targets += scored[i]
        trees[-1].add(i, tokens, len(tokens) - fresh)
    return trees


def _common_prefix(left: Ints, right: Ints) -> int:
    n = min(len(left), len(right))
    different = np.flatnonzero(left[:n] != right[:n])
    return int(different[0]) if len(different) else n


def _concatenate(arrays: list[Ints]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def one_token(device: torch.device) -> PackedBatch:
    """A batch without rows, for a rank that takes part in a pass of others."""
    ids = torch.zeros((1, 1), dtype=torch.int64, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return PackedBatch(ids, zero, zero, zero, spans=(1,))
