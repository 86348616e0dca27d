"""One split of a job's tasks: which item a query is, however often the split is gone through."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from troupe.data.rows import CountTokens, DataError, DataRows, load_rows
from troupe.job.data import TasksSpec
from troupe.workflow.loading import Tasks, load_tasks

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRAIN: Final = "train"


class TaskSplit:
    """One split of a job's tasks, of a class of the user's or of a data set.

    Queries are counted without end; `position` says which item of the split one is. It depends on
    the seed and the query's number alone, so that a resumed job goes on with the same queries.
    """

    def __init__(self, items: Tasks, length: int, source: str, shuffled: str | None = None) -> None:
        """`length`: that of `items` now; code of users may report another one later. `shuffled`:
        what the order is drawn from; None: that of the items."""
        self._items = items
        self._length = length
        self._shuffled = shuffled
        self.source = source
        """What the items come from, for messages."""
        self.notes: list[str] = []
        """What became of the rows of a data set."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Mapping[str, Any]:
        return self._items[position]

    def position(self, index: int) -> int:
        """Which item query `index` is. Each pass over the items takes every one of them once."""
        if self._shuffled is None:
            return index % self._length
        turn, at = divmod(index, self._length)
        return int(_permutation(f"{self._shuffled}/{turn}", self._length)[at])


@lru_cache(maxsize=8)
def _permutation(key: str, length: int) -> NDArray[np.int32]:
    """A permutation of 0 .. length - 1 that is drawn from `key`."""
    seed = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=32).digest(), np.uint32)
    # The legacy generator: its streams are the same in every release of numpy.
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
    """One split ("train" or "held_out") of `spec`. Blocking.

    `seed`: the job's; held-out queries are the same, in the same order, for every seed. `whole`:
    all rows are held out, as those of a named evaluation are. Raises `EntrypointError` and
    `DataError`, naming a field below `field`.
    """
    if spec.source:
        items, length = load_tasks(spec.source, split, spec.args, f"{field}.source")
        return TaskSplit(items, length, spec.source)
    training = split == TRAIN
    own = spec.held_out if isinstance(spec.held_out, str) and not training else None
    rows = load_rows(spec, field, split=own, count_tokens=count_tokens)
    notes = [str(rows.report)]
    if isinstance(spec.held_out, float):
        rows = _part(rows, spec.held_out, training=training, field=field)
        notes.append(f"{len(rows):,} of them are for {'training' if training else 'evaluations'}")
    elif not training and own is None and not whole:
        raise DataError(
            "it is not said which rows evaluations ask",
            kind="split_missing",
            field=f"{field}.held_out",
            remedy="Name a split or a file, or a fraction (0.05) of the rows.",
        )
    drawn_from = f"{seed if training else 0}/{split}" if spec.shuffle else None
    found = TaskSplit(rows, len(rows), rows.report.source, drawn_from)
    found.notes = ["; ".join(notes)]
    return found


def _part(rows: DataRows, fraction: float, *, training: bool, field: str) -> DataRows:
    """The rows that are set aside for evaluations, or the others.

    A hash of a row decides, so that equal rows are on one side, whatever their order is.
    """
    count = round(fraction * len(rows))
    if not 0 < count < len(rows):
        raise DataError(
            f"{fraction:g} of {len(rows)} rows are {count}",
            kind="no_rows",
            field=f"{field}.held_out",
            value=fraction,
            remedy="Both training and evaluations need rows.",
        )
    limit = np.partition(rows.digests, count - 1)[count - 1]
    aside = rows.digests <= limit
    return rows.where(~aside if training else aside)
