"""From rows to forward passes: which tokens are computed together.

Two layouts, the same mathematics. *Padded*: rows of similar length side by side; causal
attention never looks at the padding behind a row, so no mask is needed. *Shared*: rows with
a common prefix (a group answers one prompt; a later turn repeats the earlier ones) become
one tree, whose common tokens are computed once; every token attends to its own ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.trainer.rows import Ints, Row

# Trees and rows whose lengths differ by less than this share a forward pass.
_BUCKET = 16


@dataclass(frozen=True)
class Piece:
    """One forward pass over B sequences of L tokens that scores N response tokens."""

    # int64 [B, L]
    input_ids: torch.Tensor
    # int64 [N]: where in the flattened [B * L] the token before the scored one is.
    positions: torch.Tensor
    # int64 [N]: the scored tokens.
    targets: torch.Tensor
    # int64 [N]: which response token of the micro-batch each one is, counted row after row.
    order: torch.Tensor
    # int64 [B, L], or None: 0 .. L-1 in every sequence.
    position_ids: torch.Tensor | None = None
    # bool [B, 1, L, L] (True: attends to), or None: causal.
    mask: torch.Tensor | None = None

    def to(self, device: torch.device) -> Piece:
        """The same on `device`."""
        fields = (self.input_ids, self.positions, self.targets, self.order)
        optional = (self.position_ids, self.mask)
        return Piece(
            *(t.to(device, non_blocking=True) for t in fields),
            *(None if t is None else t.to(device, non_blocking=True) for t in optional),
        )


@dataclass(frozen=True)
class Costs:
    """Relative cost of a forward pass: per token, and per pair of tokens in attention."""

    token: float
    pair: float

    def padded(self, length: int) -> float:
        """Of one row alone, under causal attention."""
        return self.token * length + self.pair * length * length / 2

    def tree(self, size: int) -> float:
        """Of a tree of `size` tokens, whose mask is dense."""
        return self.token * size + self.pair * size * size


class _Tree:
    """Rows laid over each other, in lexicographic order."""

    def __init__(self) -> None:
        self._tokens: list[Ints] = []
        self._depths: list[Ints] = []
        self.size = 0
        # (index of the row, node of each of its tokens)
        self.paths: list[tuple[int, Ints]] = []

    def add(self, index: int, tokens: Ints, common: int) -> None:
        """Add a row whose first `common` tokens are those of the row added before."""
        fresh = np.arange(self.size, self.size + len(tokens) - common)
        path = np.concatenate([self.paths[-1][1][:common], fresh]) if common else fresh
        self._tokens.append(tokens[common:])
        self._depths.append(np.arange(common, len(tokens)))
        self.size += len(fresh)
        self.paths.append((index, path))

    @property
    def tokens(self) -> Ints:
        """Token of each node."""
        return np.concatenate(self._tokens)

    @property
    def depths(self) -> Ints:
        """Position of each node in its rows."""
        return np.concatenate(self._depths)


def plan(
    rows: Sequence[Row], budget: int, *, sharing: Costs | None = None, limit: int | None = None
) -> list[Piece]:
    """Pieces that together score every response token of `rows` exactly once.

    A piece has at most `budget` tokens, padding included, and scores at most `limit` of them
    (None: no bound), but always holds at least one sequence. `sharing` turns the shared
    layout on where its costs say that it pays. Rows without response tokens are left out.
    Deterministic: depends on the order of `rows` only through ties.
    """
    starts = np.cumsum([0, *(row.response_length for row in rows)])
    chosen = [i for i, row in enumerate(rows) if row.response_length]
    # The last token of a row is scored, never fed.
    fed = {i: rows[i].ids[:-1] for i in chosen}
    found = [] if sharing is None else _share(fed, sharing)
    trees = [tree for tree in found if len(tree.paths) > 1]
    joined = {i for tree in trees for i, _ in tree.paths}
    alone = [i for i in chosen if i not in joined]
    lone = [(len(fed[i]), rows[i].response_length) for i in alone]
    joint = [(t.size, sum(rows[i].response_length for i, _ in t.paths)) for t in trees]
    return [
        *(
            _padded([alone[k] for k in part], rows, fed, starts)
            for part in _bucket(lone, budget, limit)
        ),
        *(
            _shared([trees[k] for k in part], rows, starts)
            for part in _bucket(joint, budget, limit)
        ),
    ]


def _bucket(sizes: list[tuple[int, int]], budget: int, limit: int | None) -> list[list[int]]:
    """Indices of (length, scored) grouped by length, longest first, within both bounds."""
    order = sorted(range(len(sizes)), key=lambda k: (-sizes[k][0], k))
    parts: list[list[int]] = []
    scored = 0
    for k in order:
        length, tokens = sizes[k]
        if parts:
            longest = sizes[parts[-1][0]][0]
            fits = (len(parts[-1]) + 1) * longest <= budget
            close = longest - length <= max(_BUCKET, longest // 4)
            small = limit is None or scored + tokens <= limit
            if fits and close and small:
                parts[-1].append(k)
                scored += tokens
                continue
        parts.append([k])
        scored = tokens
    return parts


def _padded(part: list[int], rows: Sequence[Row], fed: dict[int, Ints], starts: Ints) -> Piece:
    length = max(len(fed[i]) for i in part)
    ids = np.zeros((len(part), length), np.int64)
    positions: list[Ints] = []
    for b, i in enumerate(part):
        ids[b, : len(fed[i])] = fed[i]
        first = b * length + rows[i].prompt_length - 1
        positions.append(np.arange(first, first + rows[i].response_length))
    return Piece(
        input_ids=torch.from_numpy(ids),
        positions=_concatenate(positions),
        targets=_concatenate([rows[i].ids[rows[i].prompt_length :] for i in part]),
        order=_concatenate([np.arange(starts[i], starts[i + 1]) for i in part]),
    )


def _share(fed: dict[int, Ints], costs: Costs) -> list[_Tree]:
    """Lay rows with long common prefixes over each other, greedily in lexicographic order."""
    # Big-endian bytes compare like the numbers: neighbours share the longest prefixes.
    order = sorted(fed, key=lambda i: (fed[i].astype(">i8").tobytes(), i))
    trees: list[_Tree] = []
    for previous, i in zip([-1, *order], order, strict=False):
        tokens = fed[i]
        common = _common_prefix(fed[previous], tokens) if previous >= 0 else 0
        if common:
            size = trees[-1].size
            apart = costs.tree(size) if len(trees[-1].paths) > 1 else costs.padded(size)
            if costs.tree(size + len(tokens) - common) > apart + costs.padded(len(tokens)):
                common = 0
        if not common:
            trees.append(_Tree())
        trees[-1].add(i, tokens, common)
    return trees


def _shared(part: list[_Tree], rows: Sequence[Row], starts: Ints) -> Piece:
    length = max(tree.size for tree in part)
    ids = np.zeros((len(part), length), np.int64)
    depth = np.zeros((len(part), length), np.int64)
    # Padding attends to itself: a row of the mask without any True is undefined.
    mask = np.broadcast_to(np.eye(length, dtype=bool), (len(part), length, length)).copy()
    positions: list[Ints] = []
    for b, tree in enumerate(part):
        ids[b, : tree.size] = tree.tokens
        depth[b, : tree.size] = tree.depths
        for i, path in tree.paths:
            mask[b, path[:, None], path[None, :]] |= np.tri(len(path), dtype=bool)
            positions.append(b * length + path[rows[i].prompt_length - 1 :])
    members = [i for tree in part for i, _ in tree.paths]
    return Piece(
        input_ids=torch.from_numpy(ids),
        positions=_concatenate(positions),
        targets=_concatenate([rows[i].ids[rows[i].prompt_length :] for i in members]),
        order=_concatenate([np.arange(starts[i], starts[i + 1]) for i in members]),
        position_ids=torch.from_numpy(depth),
        mask=torch.from_numpy(mask[:, None]),
    )


def _common_prefix(left: Ints, right: Ints) -> int:
    n = min(len(left), len(right))
    different = np.flatnonzero(left[:n] != right[:n])
    return int(different[0]) if len(different) else n


def _concatenate(arrays: list[Ints]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))
