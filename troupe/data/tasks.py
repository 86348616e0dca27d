"""One split of a job's tasks: maps queries to items over any number of passes through the split."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from troupe.data.rows import CountTokens, DataRows, load_rows
from troupe.data.tables import DataError, check_files_apart
from troupe.job.sections.data import TasksSpec
from troupe.workflow.environments.adapters.verifiers import VerifiersTasks
from troupe.workflow.loading import Tasks, load_tasks

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRAIN: Final = "train"
# Number of queries in which each source of a mixture has its exact share.
_BLOCK: Final = 1000


class TaskSplit:
    """One split of a job's tasks, from a user's class or a data set.

    The number of queries is unlimited; `position` maps a query to an item of the split. It depends
    only on the seed and the query's number, so that a resumed job continues with the same queries.
    """

    def __init__(self, items: Tasks, length: int, source: str, shuffled: str | None = None) -> None:
        """Create the split. `length`: current length of `items`; user code may report another
        later. `shuffled`: the key from which the order is drawn; None: the order of the items."""
        self._items = items
        self._length = length
        self._shuffled = shuffled
        self.source = source
        """Name of the items' source, for messages."""
        self.notes: list[str] = []
        """Texts for the user: rows of a data set that were kept and dropped."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Mapping[str, Any]:
        return self._items[position]

    @property
    def digests(self) -> NDArray[np.uint64] | None:
        """A hash of each row, in any order; None unless all items are rows of data sets."""
        return self._items.digests if isinstance(self._items, DataRows | _Chain) else None

    def position(self, index: int) -> int:
        """Return the item of query `index`. Each pass over the items takes every item once."""
        if self._shuffled is None:
            return index % self._length
        turn, at = divmod(index, self._length)
        return int(_permutation(f"{self._shuffled}/{turn}", self._length)[at])

    @property
    def sources(self) -> Sequence[int]:
        """The number of items of each source, in the order of the job."""
        return (self._length,)

    def position_in(self, source: int, item: int) -> int:
        """Return the item of the split that is item `item` of a source, in the order of its first
        pass."""
        return self.position(item)


@lru_cache(maxsize=8)
def _permutation(key: str, length: int) -> NDArray[np.int32]:
    """Return a permutation of 0 .. length - 1, drawn from `key`."""
    seed = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=32).digest(), np.uint32)
    # The legacy generator, whose streams are the same in every release of numpy.
    drawn = np.random.RandomState(seed).permutation(length)  # type: ignore[arg-type]
    return drawn.astype(np.int32)


def open_tasks(
    spec: TasksSpec,
    split: str,
    seed: int,
    *,
    field: str = "tasks",
    count_tokens: CountTokens | None = None,
    whole: bool = False,
) -> TaskSplit:
    """Return one split ("train" or "held_out") of `spec`. Blocking.

    `seed`: the job's seed; held-out queries are the same, in the same order, for every seed.
    `whole`: all rows are held out, as for a named evaluation. Raises `EntrypointError` and
    `DataError`, naming a field below `field`.
    """
    if spec.mixed:
        return _open_mix(spec, split, seed, field=field, count_tokens=count_tokens)
    if spec.source:
        items, length = load_tasks(spec.source, split, spec.args, f"{field}.source")
        return TaskSplit(items, length, spec.source)
    training = split == TRAIN
    if spec.verifiers is not None:
        fraction = spec.held_out if isinstance(spec.held_out, float) else None
        own_tasks = VerifiersTasks(
            spec.verifiers, split, held_out=fraction, whole=whole, field=field
        )
        order = f"{seed if training else 0}/{split}"
        shuffled = spec.shuffle and not own_tasks.endless
        source = f"verifiers:{spec.verifiers.environment}"
        return TaskSplit(own_tasks, len(own_tasks), source, order if shuffled else None)
    own = spec.held_out if isinstance(spec.held_out, str) and not training else None
    rows = load_rows(spec, field, split=own, count_tokens=count_tokens)
    notes = [str(rows.report)]
    if isinstance(spec.held_out, float):
        rows = _part(rows, spec.held_out, training=training, field=field)
        notes.append(f"{len(rows):,} of them are for {'training' if training else 'evaluations'}")
    elif not training and own is None and not whole:
        raise DataError(
            "the job does not say which rows evaluations use",
            kind="split_missing",
            field=f"{field}.held_out",
            remedy="Name a split or a file, or a fraction (0.05) of the rows.",
        )
    drawn_from = f"{seed if training else 0}/{split}" if spec.shuffle else None
    found = TaskSplit(rows, len(rows), rows.report.source, drawn_from)
    found.notes = ["; ".join(notes)]
    return found


def compare_splits(training: TaskSplit, held_out: TaskSplit, field: str) -> None:
    """Add a note to `held_out` if it shares rows with `training`: files with different names and
    formats may contain the same rows. Raises `DataError` if all rows are shared."""
    if training.digests is None or held_out.digests is None:
        return
    shared = int(np.isin(held_out.digests, training.digests).sum())
    if shared == len(held_out):
        raise DataError(
            f"held-out rows must not be training rows: all {shared:,} of {held_out.source} are "
            f"also rows of {training.source}",
            kind="split_overlap",
            field=f"{field}.held_out",
            value=held_out.source,
            remedy="Name another split or file, or give a fraction (0.05) of the rows.",
        )
    if shared:
        held_out.notes.append(f"{shared:,} rows of {held_out.source} are also training rows")


class TaskMix(TaskSplit):
    """Several sources, queried in proportion to their weights.

    In each block of `_BLOCK` queries every source has its share, in an order drawn from the seed.
    The query's number alone determines how many queries of its source came before.
    """

    def __init__(
        self, parts: Sequence[TaskSplit], weights: Sequence[float], drawn_from: str
    ) -> None:
        """Mix `parts` by `weights`, which are positive."""
        chain = _Chain(parts)
        super().__init__(chain, len(chain), ", ".join(part.source for part in parts))
        self._parts, self._starts, self._drawn_from = parts, chain.starts, drawn_from
        shares = np.array(weights) / sum(weights) * _BLOCK
        # Largest remainders; a source with a tiny weight gets one query.
        self._shares = np.maximum(1, np.floor(shares).astype(int))
        while (left := _BLOCK - int(self._shares.sum())) != 0:
            at = np.argmax(shares - self._shares) if left > 0 else np.argmax(self._shares)
            self._shares[at] += 1 if left > 0 else -1
        self._part_of = np.repeat(np.arange(len(parts)), self._shares)

    def position(self, index: int) -> int:
        """Return the item of query `index`."""
        block, at = divmod(index, _BLOCK)
        order = self._part_of[_permutation(f"{self._drawn_from}/{block}", _BLOCK)]
        part = int(order[at])
        before = block * int(self._shares[part]) + int(np.count_nonzero(order[:at] == part))
        return self._starts[part] + self._parts[part].position(before)

    @property
    def sources(self) -> Sequence[int]:
        """The number of items of each source, in the order of the job."""
        return [len(part) for part in self._parts]

    def position_in(self, source: int, item: int) -> int:
        """Return the item of the mixture that is item `item` of a source, in the order of its first
        pass."""
        return self._starts[source] + self._parts[source].position(item)


class _Chain:
    """The items of several splits, one split after another."""

    def __init__(self, parts: Sequence[TaskSplit]) -> None:
        self._parts = parts
        *self.starts, self._length = accumulate(map(len, parts), initial=0)

    @property
    def digests(self) -> NDArray[np.uint64] | None:
        """See `TaskSplit.digests`."""
        each = [part.digests for part in self._parts]
        found = [one for one in each if one is not None]
        return np.concatenate(found) if len(found) == len(each) else None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        part = bisect_right(self.starts, index) - 1
        return self._parts[part][index - self.starts[part]]


def _open_mix(
    spec: TasksSpec, split: str, seed: int, *, field: str, count_tokens: CountTokens | None
) -> TaskSplit:
    training = split == TRAIN
    chosen = {name: one for name, one in spec.mixed.items() if training or one.evaluated}
    if not chosen:
        raise DataError(
            "none of the sources holds out queries for evaluations",
            kind="split_missing",
            field=f"{field}.mix",
            remedy="Give one of them `held_out`: a split, a file, or a fraction (0.05).",
        )
    for name, one in chosen.items():
        for other in spec.mixed.values():
            if isinstance(one.held_out, str) and not training:
                check_files_apart(f"{field}.mix.{name}", one.held_out, other.dataset)
    parts = [
        open_tasks(one, split, seed, field=f"{field}.mix.{name}", count_tokens=count_tokens)
        for name, one in chosen.items()
    ]
    found: TaskSplit
    if training:
        weights = [one.weight for one in chosen.values()]
        found = TaskMix(parts, weights, f"{seed}/{split}/mix")
    else:
        chain = _Chain(parts)
        found = TaskSplit(chain, len(chain), ", ".join(one.source for one in parts), f"0/{split}")
    found.notes = [note for part in parts for note in part.notes]
    return found


def _part(rows: DataRows, fraction: float, *, training: bool, field: str) -> DataRows:
    """Return the rows reserved for evaluations, or the others.

    A hash of each row decides, so the order of the rows does not matter. Equal rows are on one
    side, and each side has at least one row.
    """
    digests, counts = np.unique(rows.digests, return_counts=True)
    if len(digests) < 2:
        raise DataError(
            f"evaluations and training need different rows, but all {len(rows):,} rows are equal",
            kind="no_rows",
            field=f"{field}.held_out",
            value=fraction,
            remedy="Add rows, or name another split or file.",
        )
    wanted = min(max(1, round(fraction * len(rows))), len(rows) - 1)
    fits, taken = np.zeros(len(digests), dtype=bool), 0
    for at, count in enumerate(counts.tolist()):
        if taken + count <= wanted:
            fits[at], taken = True, taken + count
        if taken == wanted:
            break
    if not taken:  # every row has more copies than `wanted`
        fits[counts.argmin()] = True
    aside = np.isin(rows.digests, digests[fits])
    return rows.where(~aside if training else aside)
