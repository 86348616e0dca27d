"""Rows of a data set as dicts: loaded by the `datasets` library, checked once, memory-mapped.

`load_rows` reads a data set of the Hugging Face hub or local files (`RowsSpec`), drops rows that
are empty, too long or duplicates, and says which. Of half a million rows it keeps 4 bytes each.
"""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from troupe.job.data import RowsSpec, reader_of
from troupe.job.section import no_directory
from troupe.outcomes import described
from troupe.workflow.errors import WorkflowError

if TYPE_CHECKING:
    from datasets import Dataset
    from numpy.typing import NDArray

# Tokens of each text.
CountTokens = Callable[[Sequence[str]], Sequence[int]]

# Rows that are looked at together, and how many numbers of dropped ones are named.
_BATCH: Final = 4096
_NAMED: Final = 5
_EMPTY: Final = "empty"
_DUPLICATE: Final = "duplicates"
_HUB_REMEDY: Final = (
    "Check the id; a private or gated one needs HF_TOKEN where it is read. Without the hub: "
    "`hf download --repo-type dataset ID` beforehand, or name local files."
)


class DataError(WorkflowError):
    """Rows cannot be had: `kind` is `data_library_missing`, `dataset_missing`, `hub_unreachable`,
    `split_missing`, `column_missing`, `dataset_unreadable` or `no_rows`."""

    kind = "dataset_unreadable"


@dataclass(frozen=True)
class RowsReport:
    """Counts and examples of kept and dropped rows of a data set."""

    source: str
    """The data set and its split."""
    total: int
    dropped: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """By reason: how many rows, and the numbers of the first ones, counted from 0."""

    @property
    def kept(self) -> int:
        """How many rows are left."""
        return self.total - sum(count for count, _ in self.dropped.values())

    def __str__(self) -> str:
        parts = [
            f"{count:,} {reason} ({_numbers(count, rows)})"
            for reason, (count, rows) in self.dropped.items()
        ]
        of = f", dropped: {'; '.join(parts)}" if parts else ""
        return f"{self.source}: {self.kept:,} of {self.total:,} rows{of}"


def _numbers(count: int, rows: Sequence[int]) -> str:
    more = ", ..." if count > len(rows) else ""
    return f"row{'s' if count > 1 else ''} {', '.join(map(str, rows))}{more}"


class DataRows:
    """Rows of a data set that were kept: `rows[i]` is a dict of fields. Read from the disk when
    asked for."""

    def __init__(
        self,
        table: Dataset,
        paths: Mapping[str, Sequence[str]],
        kept: NDArray[np.int32] | None,
        report: RowsReport,
        digests: NDArray[np.uint64],
    ) -> None:
        """`paths`: by field the column and what leads into it. `kept`: row numbers; None: all.
        `digests`: a hash of each kept row's fields."""
        self._table = table
        self._paths = paths
        self._kept = kept
        self.report = report
        self.digests = digests

    def __len__(self) -> int:
        return len(self._table) if self._kept is None else len(self._kept)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = self._table[index if self._kept is None else int(self._kept[index])]
        return {name: _inside(row[path[0]], path[1:]) for name, path in self._paths.items()}

    def where(self, mask: NDArray[np.bool_]) -> DataRows:
        """The rows for which `mask` is true."""
        found = np.flatnonzero(mask).astype(np.int32)
        kept = found if self._kept is None else self._kept[found]
        return DataRows(self._table, self._paths, kept, self.report, self.digests[found])


def load_rows(
    spec: RowsSpec, field: str, *, split: str | None = None, count_tokens: CountTokens | None = None
) -> DataRows:
    """The rows of a data set, in its own order. Blocking: downloads and converts at first use.

    `field`: the section of the job, for errors. `split`: instead of `spec.split`; a file instead of
    `spec.dataset`. `count_tokens`: needed by `max_tokens`. Raises `DataError`.
    """
    table = _load(spec, field, split)
    source = split if split and reader_of(split) else spec.dataset
    name = source if reader_of(source) else f"{source} {split or spec.split or 'train'}"
    paths = _paths(table, spec, field)
    checked = _RowCheck(spec, paths, count_tokens)
    # Only the columns that are looked at are read.
    columns = list(dict.fromkeys(path[0] for path in paths.values()))
    view = table.select_columns(columns).with_format("arrow")
    for batch in view.iter(batch_size=_BATCH):
        checked.add({one: batch[one].to_pylist() for one in columns}, len(batch))
    dropped, kept, digests = checked.result()
    report = RowsReport(name, len(table), dropped)
    if not report.kept:
        raise DataError(
            f"no row is left. {report}",
            kind="no_rows",
            field=f"{field}.dataset",
            value=source,
            remedy="Look at its rows, at `columns`, `max_characters` and `max_tokens`.",
        )
    return DataRows(table, paths, None if len(kept) == len(table) else kept, report, digests)


class _RowCheck:
    """Looks at all rows, batch by batch: which are empty, too long, or duplicates."""

    def __init__(
        self,
        spec: RowsSpec,
        paths: Mapping[str, Sequence[str]],
        count_tokens: CountTokens | None,
    ) -> None:
        assert count_tokens is not None or not spec.max_tokens, "a tokenizer counts tokens"
        self._spec = spec
        self._paths = paths
        self._count_tokens = count_tokens
        self._rows = 0
        self._dropped: dict[str, tuple[int, list[int]]] = {}
        self._good: list[NDArray[np.int32]] = []
        self._digests: list[NDArray[np.uint64]] = []

    def add(self, columns: Mapping[str, list[Any]], count: int) -> None:
        """Looks at the next rows: `count` values of each column."""
        values = {
            name: [_inside(value, path[1:]) for value in columns[path[0]]]
            for name, path in self._paths.items()
        }
        good = np.ones(count, dtype=bool)
        self._drop(_EMPTY, good, np.array(self._empty(values, count), dtype=bool))
        for name, most in self._spec.max_characters.items():
            lengths = np.array([len(content_of(value)) for value in values[name]])
            self._drop(f"with more than {most:,} characters of {name}", good, lengths > most)
        for name, most in self._spec.max_tokens.items():
            assert self._count_tokens is not None, "checked"
            left = np.flatnonzero(good)
            long = np.zeros(count, dtype=bool)
            if len(left):
                texts = [content_of(values[name][row]) for row in left]
                long[left] = np.asarray(self._count_tokens(texts)) > most
            self._drop(f"with more than {most:,} tokens of {name}", good, long)
        rows = np.flatnonzero(good)
        parts = zip(*(map(_text_of, one) for one in values.values()), strict=True)
        digests = np.fromiter(map(_digest, parts), np.uint64, count)
        self._good.append((rows + self._rows).astype(np.int32))
        self._digests.append(digests[rows])
        self._rows += count

    def result(
        self,
    ) -> tuple[dict[str, tuple[int, tuple[int, ...]]], NDArray[np.int32], NDArray[np.uint64]]:
        """Dropped rows by reason, the numbers of the kept ones, a hash of each of these."""
        kept = np.concatenate([np.empty(0, np.int32), *self._good])
        digests = np.concatenate([np.empty(0, np.uint64), *self._digests])
        if self._spec.duplicates == "drop":
            _, first = np.unique(digests, return_index=True)
            repeated = np.ones(len(kept), dtype=bool)
            repeated[first] = False
            if (found := kept[repeated]).size:
                self._dropped[_DUPLICATE] = (len(found), found[:_NAMED].tolist())
            first.sort()
            kept, digests = kept[first], digests[first]
        dropped = {why: (count, tuple(rows)) for why, (count, rows) in self._dropped.items()}
        return dropped, kept, digests

    def _empty(self, values: Mapping[str, list[Any]], count: int) -> list[bool]:
        """Whether a row lacks a field: one of `columns`; without these all of them."""
        flags = [[_is_empty(value) for value in one] for one in values.values()]
        judge = any if self._spec.columns else all
        return list(map(judge, zip(*flags, strict=True))) if flags else list(repeat(True, count))

    def _drop(self, why: str, good: NDArray[np.bool_], bad: NDArray[np.bool_]) -> None:
        """Marks rows of the batch as dropped; a row is counted under the first reason."""
        found = np.flatnonzero(good & bad)
        good[found] = False
        if len(found):
            count, rows = self._dropped.get(why, (0, []))
            rows += (found[: _NAMED - len(rows)] + self._rows).tolist()
            self._dropped[why] = (count + len(found), rows)


def content_of(value: Any) -> str:
    """The text of a value whose length counts: itself, the contents of messages, else JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        return "\n".join(content_of(one.get("content")) for one in value)
    return "" if value is None else _text_of(value)


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _digest(texts: Sequence[str]) -> int:
    return xxhash.xxh3_64_intdigest("\x1f".join(texts).encode("utf-8", "surrogatepass"))


def _is_empty(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, list | dict) and not value)


def _inside(value: Any, path: Sequence[str]) -> Any:
    """What `path` leads to inside of `value`; None where a part is missing."""
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _paths(table: Dataset, spec: RowsSpec, field: str) -> dict[str, list[str]]:
    """By field the column and what leads into it. Raises `DataError` for a column that is none."""
    there = list(table.column_names)
    if not spec.columns:
        for bounds in ("max_characters", "max_tokens"):
            for name in getattr(spec, bounds):
                if name not in there:
                    raise _no_column(f"{field}.{bounds}.{name}", name, there)
        return {name: [name] for name in there}
    found = {}
    for name, column in spec.columns.items():
        path = [column] if column in there else column.split(".")
        kind: Any = table.features
        for part in path:
            if not isinstance(kind, Mapping) or part not in kind:
                known = list(kind) if isinstance(kind, Mapping) else []
                raise _no_column(f"{field}.columns.{name}", column, known or there)
            kind = kind[part]
        found[name] = path
    return found


def _no_column(field: str, column: str, there: Sequence[str]) -> DataError:
    return DataError(
        f"'{column}' is no column of the data set",
        kind="column_missing",
        field=field,
        value=column,
        remedy=f"There are: {', '.join(there)}.",
    )


def _load(spec: RowsSpec, field: str, split: str | None) -> Dataset:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"the library `datasets` cannot be imported: {error}",
            kind="data_library_missing",
            field=f"{field}.dataset",
            value=spec.dataset,
            remedy='`pip install "troupe[data]"` where rollout workers (and trainers) run.',
        ) from error
    datasets.disable_progress_bars()
    source = split if split and reader_of(split) else spec.dataset
    reader = reader_of(source)
    where = f"{field}.held_out" if source != spec.dataset else f"{field}.dataset"
    wanted = "train" if reader else split or spec.split or "train"
    if (reader and not glob.glob(source)) or (not reader and no_directory(source)):
        raise DataError(
            "there is no such file or folder",
            kind="dataset_missing",
            field=where,
            value=source,
            remedy="The path is that of the host that reads it, relative to the directory in which "
            "its service was started.",
        )
    try:
        if reader:
            more = {"sep": "\t"} if source.endswith(".tsv") else {}
            return datasets.load_dataset(reader, data_files=source, split=wanted, **more)
        return datasets.load_dataset(source, spec.config, split=wanted, revision=spec.revision)
    except Exception as error:  # pyarrow, pandas, fsspec and the hub raise their own
        of_split = f"{field}.{'held_out' if split else 'split'}", wanted
        raise _explained(error, spec, field, (where, source), of_split) from error


def _explained(
    error: Exception,
    spec: RowsSpec,
    field: str,
    of_source: tuple[str, str],
    of_split: tuple[str, str],
) -> DataError:
    """The `DataError` for what the `datasets` library raised. `of_source`, `of_split`: field and
    value of these."""
    from datasets.exceptions import DatasetNotFoundError

    kinds: list[tuple[bool, str, tuple[str, object], str]] = [
        (isinstance(error, ConnectionError), "hub_unreachable", of_source, _HUB_REMEDY),
        (
            isinstance(error, DatasetNotFoundError) and str(error).startswith("Revision"),
            "dataset_missing",
            (f"{field}.revision", spec.revision),
            "Name a commit, branch or tag of the data set.",
        ),
        (isinstance(error, FileNotFoundError), "dataset_missing", of_source, _HUB_REMEDY),
        (
            isinstance(error, ValueError) and "split" in str(error).lower(),
            "split_missing",
            of_split,
            "Name a split that the data set has.",
        ),
        (
            isinstance(error, ValueError) and "config" in str(error).lower(),
            "dataset_missing",
            (f"{field}.config", spec.config),
            "Name one of the configurations as `config`.",
        ),
    ]
    for found, kind, (name, value), remedy in kinds:
        if found:
            return DataError(described(error), kind=kind, field=name, value=value, remedy=remedy)
    cause = error.__cause__ or error
    return DataError(
        f"it cannot be read: {described(cause)}",
        field=of_source[0],
        value=of_source[1],
        remedy="Make `datasets.load_dataset(...)` work where it is read; it writes its cache below "
        "HF_HOME.",
    )
