"""Batching of rows into forward passes, within a budget of tokens.

*Packed*: rows are concatenated into one sequence without padding. With prefix sharing, rows with a
common prefix (a group answers one prompt; a later turn repeats the earlier ones) form a prefix
tree, whose common tokens are computed once. *Padded*, for models whose attention does not support
packing: rows of similar length, right-padded; causal attention never attends to the padding, so no
mask is needed.

A tree or row larger than a pass is *cut* into pieces (history.py), each of which attends to keys
and values that earlier ones left. With context parallelism the ranks of a gang divide the tokens of
each pass (`Slices`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch

from services.trainer.learning.samples import Ints, Row
from services.trainer.learning.sequences.history import History, Past, schedule_pieces
from troupe.contracts.payloads import Payloads
from troupe.rpc import FailedPrecondition

# Rows whose lengths differ by at most this, or a quarter, share a block of attention.
_CLOSE = 16
# Padded rows whose lengths differ by at most this, or a quarter, share a forward pass.
_BUCKET = 16
# Cost of a token in an uncut sequence (a forward pass, and twice that backward), in units of the
# additional forward pass of a token in a piece that others read.
_LEARNT_OVER_KEPT: Final = 3


@dataclass(frozen=True)
class Segment:
    """A run of tokens in a packed sequence, each of which follows its predecessor in a row."""

    # int64 [length]: index among the pass's keys of each token from the row's first to the run's
    # last.
    path: Ints
    # Number of fresh tokens, which no other segment has: the last tokens, adjacent in the sequence.
    fresh: int
    # Index in the sequence of the first fresh token; None: its key's index.
    start: int | None = None

    @property
    def shared(self) -> int:
        """Number of tokens before the fresh ones."""
        return len(self.path) - self.fresh

    @property
    def queries(self) -> Ints:
        """Indices in the sequence of the fresh tokens, int64 [fresh]."""
        first = int(self.path[self.shared]) if self.start is None else self.start
        return np.arange(first, first + self.fresh)


@dataclass(frozen=True)
class Block:
    """n rows that attention computes together: Q queries (fresh tokens) and K keys (all) each."""

    # int64 [n * Q], [n * K]: tokens of the sequence; shorter rows repeat their last one.
    queries: torch.Tensor
    keys: torch.Tensor
    # n, Q, K
    shape: tuple[int, int, int]
    # Whether attention needs a mask; else it is causal, with Q == K.
    masked: bool
    # int64 [n]: position of each row's first query.
    first: torch.Tensor
    # The first token, if queries and keys are start, start + 1, ... without a gap; else None.
    start: int | None
    # Masks by window, made for the first kernel that reads one: Q * K bytes a row.
    made: dict[int | None, torch.Tensor] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    @property
    def mask(self) -> torch.Tensor | None:
        """bool [n, 1, Q, K] (True: attends to), or None: causal, Q == K."""
        return self._made(None) if self.masked else None

    def mask_within(self, window: int) -> torch.Tensor | None:
        """Return the mask of a layer with a sliding window of `window` tokens, its own included."""
        return self.mask if self.shape[2] <= window else self._made(window)

    def _made(self, window: int | None) -> torch.Tensor:
        if window not in self.made:
            _, queries, keys = self.shape
            device = self.queries.device
            q = self.first[:, None, None] + torch.arange(queries, device=device)[:, None]
            k = torch.arange(keys, device=device)
            mask = k <= q
            self.made[window] = (mask if window is None else mask & (q - k < window))[:, None]
        return self.made[window]


@dataclass(frozen=True)
class Slices:
    """The ranks that divide the tokens of every pass (context parallelism)."""

    rank: int
    size: int
    # Function from this rank's keys [1, G, t, D] and values [1, G, t, E], and a number w >= t, to
    # the keys and values of all ranks, padded to w tokens each, rank after rank. Differentiable:
    # gradients are summed.
    gather: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Packing:
    """The attention structure of a packed sequence of T tokens."""

    blocks: tuple[Block, ...]
    # int64 [T]: each token's position in the concatenated outputs of the blocks; None: in order.
    place: torch.Tensor | None
    # Per row, for variable-length kernels: number of fresh tokens, of all tokens.
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    # int64 [sum of key_lengths]: the tokens of each row's keys, row after row.
    paths: torch.Tensor
    # Whether those are the tokens of the sequence in order.
    ordered: bool
    # Of a piece of a longer sequence.
    past: Past | None = None
    # The ranks that divide the pass, and each rank's tokens, all padded to one number; None: one
    # rank has all tokens.
    slices: Slices | None = None
    slice_tokens: int = 0
    # Cache of attention.py: indices that one layer derived, for the other layers of its kind.
    made: dict[Hashable, Any] = field(init=False, default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        segments: Sequence[Segment],
        past: Past | None = None,
        slices: Slices | None = None,
        slice_tokens: int = 0,
    ) -> Packing:
        """Make the packing of segments whose fresh tokens are concatenated in this order."""
        blocks, places, offset = [], np.empty(sum(s.fresh for s in segments), np.int64), 0
        for members in _similar(segments):
            block, own, positions = _block([segments[i] for i in members])
            places[own] = offset + positions
            offset += block.shape[0] * block.shape[1]
            blocks.append(block)
        ordered = offset == len(places) and bool((np.diff(places) == 1).all())
        paths = np.concatenate([s.path for s in segments])
        plain = past is None and len(paths) == len(places)
        return cls(
            tuple(blocks),
            None if ordered else torch.from_numpy(places),
            tuple(s.fresh for s in segments),
            tuple(len(s.path) for s in segments),
            torch.from_numpy(paths),
            plain and bool((paths == np.arange(len(paths))).all()),
            past,
            slices,
            slice_tokens,
        )

    @cached_property
    def cumulative(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cumulative lengths of queries and of keys, int32 [rows + 1] each."""
        device = self.paths.device
        found = []
        for lengths in (self.query_lengths, self.key_lengths):
            edges = np.cumsum([0, *lengths], dtype=np.int32)
            found.append(torch.from_numpy(edges).to(device, non_blocking=True))
        return found[0], found[1]


def _similar(segments: Sequence[Segment]) -> list[list[int]]:
    """Return indices of segments grouped by similar lengths, longest first."""

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
    """Return a block of rows, their fresh tokens, and these tokens' positions in the block's [n *
    Q]."""
    n, width = len(rows), max(row.fresh for row in rows)
    depth = max(row.shared for row in rows)
    length = width if not depth else max(len(row.path) for row in rows)
    queries, keys = np.empty((n, width), np.int64), np.empty((n, length), np.int64)
    positions: list[Ints] = []
    for b, row in enumerate(rows):
        own = row.queries
        queries[b, : row.fresh], queries[b, row.fresh :] = own, own[-1]
        keys[b, : len(row.path)], keys[b, len(row.path) :] = row.path, row.path[-1]
        positions.append(np.arange(b * width, b * width + row.fresh))
    flat, read = queries.reshape(-1), keys.reshape(-1)
    dense = not depth and bool((np.diff(flat) == 1).all()) and np.array_equal(flat, read)
    block = Block(
        torch.from_numpy(flat),
        torch.from_numpy(read),
        (n, width, length),
        depth > 0,
        torch.from_numpy(np.array([row.shared for row in rows])),
        int(flat[0]) if dense else None,
    )
    return block, np.concatenate([row.queries for row in rows]), np.concatenate(positions)


@dataclass(frozen=True)
class PackedBatch:
    """The input of one forward pass: B sequences of L tokens, N of which are scored."""

    # int64 [B, L]
    input_ids: torch.Tensor
    # int64 [N]: position in the flattened [B * L] of the token before each scored one.
    positions: torch.Tensor
    # int64 [N]: the scored tokens.
    targets: torch.Tensor
    # int64 [N]: index of each scored token among the scored tokens of all rows, row after row.
    order: torch.Tensor
    # Number of scored tokens of each row; a row's scored tokens are adjacent.
    spans: tuple[int, ...] = ()
    # int64 [B, L], or None: 0 .. L-1 in every sequence.
    position_ids: torch.Tensor | None = None
    # Attention structure of a packed sequence; None: a padded batch.
    packing: Packing | None = None
    # int16 [B * L, layers, k]: the experts to which engines routed each token; negative where no
    # row records them; None: no row does.
    routes: torch.Tensor | None = None
    # Payloads that tokens stand for, by the position of their first token in the flattened [B * L].
    # None: no rank's batch of this pass has any. Empty: only other ranks' batches have, and the
    # model joins the computations that only payloads need.
    payloads: Payloads | None = None
    # Whether the pass runs without gradients, only for its keys and values; it scores nothing.
    keeps: bool = False
    # Of a piece: int64 [N], the indices of its scored tokens in `History.order`; None: not cut.
    within: torch.Tensor | None = None
    # Pieces whose keys and values no later pass reads.
    done: tuple[int, ...] = ()

    @property
    def history(self) -> History | None:
        """The state shared by the pieces of a cut sequence; None: not cut."""
        past = None if self.packing is None else self.packing.past
        return None if past is None else past.history

    def forget(self) -> None:
        """Drop keys and values that no pass after this one reads."""
        for piece in self.done:
            if self.history is not None:
                self.history.forget(piece)

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch on `device`."""
        return PackedBatch(**_fields_on(self, device))


def _fields_on(part: Block | Packing | Past | PackedBatch, device: torch.device) -> dict[str, Any]:
    """Return the fields of `part`, with all tensors on `device`."""
    return {f.name: _on(getattr(part, f.name), device) for f in fields(part) if f.init}


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Block | Packing | Past):
        return type(value)(**_fields_on(value, device))
    if isinstance(value, tuple) and value and isinstance(value[0], Block | tuple):
        return tuple(_on(one, device) for one in value)
    if isinstance(value, tuple):
        return tuple(one.to(device) if isinstance(one, torch.Tensor) else one for one in value)
    return value


@dataclass(frozen=True)
class PassCosts:
    """Cost model of a forward pass in FLOPs: per token, and per pair of tokens in attention."""

    token: float
    pair: float

    def alone(self, length: int) -> float:
        """Return the cost of one row of `length` tokens by itself."""
        return self.token * length + self.pair * length * length / 2

    def joined(self, fresh: int, length: int) -> float:
        """Return the cost of the last `fresh` tokens of a row whose other tokens another row
        computes."""
        return self.token * fresh + self.pair * fresh * length


class _PrefixTree:
    """A prefix tree of rows, which are added in lexicographic order; a node per token."""

    def __init__(self) -> None:
        self._tokens: list[Ints] = []
        self._depths: list[Ints] = []
        self.size = 0
        # Per row: its index, the node of each of its tokens, the number of tokens that only it has.
        self.rows: list[tuple[int, Ints, int]] = []
        # Runs of nodes, each the child of its predecessor: a row that only continues the previous
        # row, like the turns of a conversation, is part of that row's segment.
        self.segments: list[Segment] = []

    def add(self, index: int, tokens: Ints, common: int) -> None:
        """Add a row that shares its first `common` tokens with the row added before."""
        fresh = np.arange(self.size, self.size + len(tokens) - common)
        path = np.concatenate([self.rows[-1][1][:common], fresh]) if common else fresh
        self.rows.append((index, path, len(fresh)))
        if not len(fresh):
            return
        self._tokens.append(tokens[common:])
        self._depths.append(np.arange(common, len(tokens)))
        self.size += len(fresh)
        before = 0
        if common and self.segments and len(self.segments[-1].path) == common:
            before = self.segments.pop().fresh
        self.segments.append(Segment(path, before + len(fresh)))

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
    cut: int | None = None,
    gradients: bool = True,
    coupled: bool = False,
    slices: Slices | None = None,
) -> list[PackedBatch]:
    """Plan batches that together score every response token of `rows` exactly once.

    A batch has at most `budget` tokens, padding included, and scores at most `limit` of them
    (None: no bound), but always holds at least one sequence. With `sharing`, common prefixes of
    packed rows are computed once where these costs make that cheaper. Rows without response tokens
    are left out. Deterministic: depends on the order of `rows` only through ties.

    With `cut`, packed sequences longer than `cut` tokens are cut into pieces of at most `cut`
    tokens. Batches must be computed in the order given, with `gradients` or without. `coupled`: a
    loss needs the scores of a whole sequence before its gradient, so that all its pieces first run
    without gradients and keep their states.
    `slices`: ranks that divide the tokens of each pass; bounds hold for each of them.
    """
    starts = np.cumsum([0, *(row.response_length for row in rows)])
    chosen = [i for i, row in enumerate(rows) if row.response_length]
    # The last token of a row is scored, never an input.
    fed = {i: rows[i].ids[:-1] for i in chosen}
    if not packed:
        sizes = [(len(fed[i]), rows[i].response_length) for i in chosen]
        parts = _bucket(sizes, budget, limit, padded=True)
        return [_padded([chosen[k] for k in part], rows, fed, starts) for part in parts]
    if slices is not None:
        budget, limit = budget * slices.size, limit and limit * slices.size
        cut = cut and cut * slices.size
    # Equal tokens that stand for payloads may mean different things: such rows share nothing.
    lone = {i: ids for i, ids in fed.items() if sharing is None or rows[i].payloads}
    trees = _alone(lone) if lone else []
    if sharing is not None and len(lone) < len(fed):
        others = {i: ids for i, ids in fed.items() if i not in lone} if lone else fed
        scored = {i: rows[i].response_length for i in others}
        trees += _share(others, scored, sharing, budget, limit, cuts=cut is not None)
    sizes = [(t.size, sum(rows[i].response_length for i, *_ in t.rows)) for t in trees]
    parts = _bucket(sizes, budget, limit, padded=False)
    batches: list[PackedBatch] = []
    for part in parts:
        forest = _Forest([trees[k] for k in part], rows, starts)
        edges = forest.edges(cut, limit)
        if len(edges) == 2 and slices is None:
            batches.append(forest.batch(rows))
        else:
            batches += forest.pieces(edges, slices, gradients=gradients, coupled=coupled)
    return batches


def _bucket(
    sizes: list[tuple[int, int]], budget: int, limit: int | None, *, padded: bool
) -> list[list[int]]:
    """Return indices of `sizes` (length, scored tokens) in groups within both bounds, longest
    first."""
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
    payloads = _payloads(places, rows)
    return replace(batch, routes=_routes(ids.size, places, rows), payloads=payloads)


def _payloads(places: Sequence[tuple[int, Ints]], rows: Sequence[Row]) -> Payloads | None:
    """Return the payloads of a batch; None if it has none. `places`: as for `_routes`; rows with
    payloads share no tokens."""
    found = [placed.moved(int(at[0])) for i, at in places for placed in rows[i].payloads]
    return tuple(found) or None


def _routes(
    size: int, places: Sequence[tuple[int, Ints]], rows: Sequence[Row]
) -> torch.Tensor | None:
    """Return routes of the `size` tokens of a batch. `places`: indices of rows, and the positions
    of each row's last input tokens; a shared prefix is routed as in the first row with it."""
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


class _Forest:
    """The trees of one batch in one sequence of T nodes, and the tokens that they score."""

    def __init__(self, trees: list[_PrefixTree], rows: Sequence[Row], starts: Ints) -> None:
        self._ids = np.concatenate([tree.tokens for tree in trees])
        self._depths = np.concatenate([tree.depths for tree in trees])
        self._segments: list[Segment] = []
        self._members: list[int] = []
        nodes: list[Ints] = []
        places: list[tuple[int, Ints]] = []
        offset = 0
        for tree in trees:
            self._segments += [Segment(one.path + offset, one.fresh) for one in tree.segments]
            for i, path, fresh in tree.rows:
                self._members.append(i)
                places.append((i, offset + path[len(path) - fresh :]))
                nodes.append(offset + path[rows[i].prompt_length - 1 :])
            offset += tree.size
        self._routes = _routes(offset, places, rows)
        self._payloads = _payloads(places, rows)
        # By scored token, row after row: its node, its number, its id.
        self._nodes = np.concatenate(nodes)
        self._order = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in self._members])
        self._targets = np.concatenate(
            [rows[i].ids[rows[i].prompt_length :] for i in self._members]
        )

    def batch(self, rows: Sequence[Row]) -> PackedBatch:
        """Return everything as one batch."""
        return PackedBatch(
            input_ids=torch.from_numpy(self._ids[None]),
            positions=torch.from_numpy(self._nodes),
            targets=torch.from_numpy(self._targets),
            order=torch.from_numpy(self._order),
            spans=tuple(rows[i].response_length for i in self._members),
            position_ids=torch.from_numpy(self._depths[None]),
            packing=Packing.of(self._segments),
            routes=self._routes,
            payloads=self._payloads,
        )

    def edges(self, cut: int | None, limit: int | None) -> list[int]:
        """Return the beginnings of pieces (at most `cut` nodes, `limit` scored tokens), and T.

        The first piece is the smallest: no piece reads the last one, so it costs no second pass.
        """
        if cut is None:
            return [0, len(self._ids)]
        scored = np.cumsum([0, *np.bincount(self._nodes, minlength=len(self._ids))])
        found = [len(self._ids)]
        while end := found[-1]:
            start = max(end - cut, 0)
            if limit is not None:
                start = max(start, int(np.searchsorted(scored, scored[end] - limit)))
            found.append(min(start, end - 1))
        return found[::-1]

    def pieces(
        self, edges: list[int], slices: Slices | None, *, gradients: bool, coupled: bool
    ) -> list[PackedBatch]:
        """Return the batches of the pieces between `edges`, of this rank of `slices`, in the order
        in which to compute them. Raises FailedPrecondition for payloads, which stay whole."""
        if self._payloads:
            raise FailedPrecondition(
                f"rows with payloads of kind {self._payloads[0].payload.kind} are longer than a "
                "pass, or are divided among ranks",
                kind="payloads_cut",
                field="trainer.forward_tokens",
                remedy="Raise it to the longest row, without context parallelism.",
            )
        rank, n = (0, 1) if slices is None else (slices.rank, slices.size)
        history = History(torch.from_numpy(self._order))
        ranges = [_divided(a, b, n) for a, b in itertools.pairwise(edges)]
        # By node: the index of its keys among its piece's keys, in which all ranks' parts are
        # padded to one length.
        place = np.empty(len(self._ids), np.int64)
        widths = []
        for parts in ranges:
            own = [np.concatenate([np.arange(a, b) for a, b in part]) for part in parts]
            widths.append(max(len(part) for part in own))
            for k in reversed(range(n)):  # the first rank last: others may repeat its tokens
                place[own[k]] = k * widths[-1] + np.arange(len(own[k]))
        made = [
            self._piece(history, edges, p, ranges[p], rank, place, n * widths[p])
            for p in range(len(edges) - 1)
        ]
        readers: dict[int, set[int]] = {p: set() for p in range(len(made))}
        for p, (_, past, _) in enumerate(made):
            # Every rank takes part in all passes of the others, whose tokens may read other pieces.
            for earlier in range(p) if n > 1 else (one for one, _ in past.earlier):
                readers[earlier].add(p)
        passes = [
            (batch, past, Packing.of(segments, past, slices, widths[p]))
            for p, (batch, past, segments) in enumerate(made)
        ]
        found = []
        for step in schedule_pieces(readers, gradients=gradients, coupled=coupled):
            batch, past, packing = passes[step.piece]
            past = replace(past, keeps=step.keeps)
            found.append(
                replace(
                    batch,
                    packing=replace(packing, past=past),
                    keeps=step.keeps and gradients,
                    done=step.done,
                )
            )
        return found

    def _piece(
        self,
        history: History,
        edges: list[int],
        piece: int,
        ranges: list[list[tuple[int, int]]],
        rank: int,
        place: Ints,
        keys: int,
    ) -> tuple[PackedBatch, Past, list[Segment]]:
        """Return the batch of a rank's nodes, `ranges[rank]`, of a piece, whose own keys are
        `keys`."""
        first, own = edges[piece], ranges[rank]
        repeats = rank > 0 and own[0][0] == ranges[0][0][0]
        paths: list[tuple[Ints, int, int]] = []
        local, count = np.full(len(self._ids), -1), 0
        for start, end in own:
            local[start:end] = count + np.arange(end - start)
            count += end - start
            for segment in self._segments:
                stop = int(segment.path[-1]) + 1
                a, b = max(start, stop - segment.fresh), min(end, stop)
                if a < b:
                    paths.append((segment.path[: len(segment.path) - (stop - b)], b - a, a))
        read = np.unique(np.concatenate([path[path < first] for path, _, _ in paths]))
        where = np.empty(len(self._ids), np.int64)
        where[first : edges[piece + 1]] = place[first : edges[piece + 1]]
        where[read] = keys + np.arange(len(read))
        earlier = []
        for p, (a, b) in enumerate(itertools.pairwise(edges[: piece + 1])):
            part = read[(read >= a) & (read < b)]
            if len(part):
                every = len(ranges) == 1 and len(part) == b - a
                earlier.append((p, None if every else torch.from_numpy(place[part])))
        nodes = np.concatenate([np.arange(a, b) for a, b in own])
        chosen = np.flatnonzero((local[self._nodes] >= 0) & (not repeats))
        batch = PackedBatch(
            input_ids=torch.from_numpy(self._ids[nodes][None]),
            positions=torch.from_numpy(local[self._nodes[chosen]]),
            targets=torch.from_numpy(self._targets[chosen]),
            order=torch.from_numpy(self._order[chosen]),
            position_ids=torch.from_numpy(self._depths[nodes][None]),
            within=torch.from_numpy(chosen),
            routes=None if self._routes is None else self._routes[torch.from_numpy(nodes)],
        )
        segments = [Segment(where[path], fresh, int(local[a])) for path, fresh, a in paths]
        return batch, Past(history, piece, tuple(earlier), keeps=False), segments


def _divided(start: int, end: int, n: int) -> list[list[tuple[int, int]]]:
    """Return nodes from `start` to `end` by rank of n: one part from the front and one from the
    back each, so that all have about equally many tokens to attend to.

    If there are few nodes, the first rank has them all, and the others repeat the first node, to
    take part in the pass.
    """
    if end - start < 2 * n:
        return [[(start, end)], *([(start, start + 1)] for _ in range(n - 1))]
    at = [start + (end - start) * i // (2 * n) for i in range(2 * n + 1)]
    return [[(at[k], at[k + 1]), (at[-k - 2], at[-k - 1])] for k in range(n)]


def _alone(fed: dict[int, Ints]) -> list[_PrefixTree]:
    trees = []
    for i, tokens in fed.items():
        trees.append(_PrefixTree())
        trees[-1].add(i, tokens, 0)
    return trees


def _share(
    fed: dict[int, Ints],
    scored: dict[int, int],
    costs: PassCosts,
    budget: int,
    limit: int | None,
    *,
    cuts: bool,
) -> list[_PrefixTree]:
    """Merge rows with long common prefixes into trees, greedily in lexicographic order."""
    # Big-endian bytes sort like the numbers: neighbours share the longest prefixes.
    order = sorted(fed, key=lambda i: (fed[i].astype(">i8").tobytes(), i))
    trees: list[_PrefixTree] = []
    targets = 0
    for previous, i in zip([-1, *order], order, strict=False):
        tokens = fed[i]
        common = _common_prefix(fed[previous], tokens) if previous >= 0 else 0
        fresh = len(tokens) - common
        fits = bool(trees) and trees[-1].size + fresh <= budget
        small = limit is None or targets + scored[i] <= limit
        if trees and cuts and not (fits and small):
            # A cut tree runs each of its tokens forward at most once more; a separate tree computes
            # and differentiates the common tokens once more.
            now, then = (-(-size // budget) for size in (trees[-1].size, trees[-1].size + fresh))
            fits = (small and now == then) or _LEARNT_OVER_KEPT * common >= budget
            small = True
        continues = common > 0 and common == len(fed[previous])
        cheaper = continues or costs.joined(fresh, len(tokens)) <= costs.alone(len(tokens))
        if not (fits and small and cheaper and common):
            common, targets = 0, 0
            trees.append(_PrefixTree())
        targets += scored[i]
        trees[-1].add(i, tokens, common)
    return trees


def _common_prefix(left: Ints, right: Ints) -> int:
    n = min(len(left), len(right))
    different = np.flatnonzero(left[:n] != right[:n])
    return int(different[0]) if len(different) else n


def _concatenate(arrays: list[Ints]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def one_token(
    device: torch.device, instead: PackedBatch | None = None, *, seeing: bool = False
) -> PackedBatch:
    """Return a batch without rows, for a rank that takes part in the other ranks' pass.

    `instead`: the batch of this rank that it replaces. If ranks divide that pass, the token's keys
    and values are gathered in place of the batch's. `seeing`: batches of other ranks have payloads.
    """
    ids = torch.zeros((1, 1), dtype=torch.int64, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    seeing = seeing or (instead is not None and instead.payloads is not None)
    payloads: Payloads | None = () if seeing else None
    found = PackedBatch(ids, zero, zero, zero, spans=(1,), payloads=payloads)
    packing = None if instead is None else instead.packing
    if packing is None or packing.past is None or packing.slices is None:
        return found
    width = packing.slice_tokens
    own = Segment(np.array([packing.slices.rank * width]), 1, 0)
    past = Past(History(packing.past.history.order), packing.past.piece, (), keeps=False)
    return replace(found, packing=Packing.of([own], past, packing.slices, width)).to(device)
