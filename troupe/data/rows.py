"""Rows of a data set as dicts of JSON values, checked once.

`load_rows` drops rows that are empty, too long or duplicates, and reports them. It keeps 12 bytes
per row; the rows themselves stay on disk (`troupe.data.tables`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from troupe.data.tables import BATCH, READABLE, DataError, Names, Table, open_table
from troupe.job.sections.data import RowsSpec, reader_of
from troupe.outcomes import JSON_DEPTH, NotJsonError, json_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Returns the number of tokens of each text.
CountTokens = Callable[[Sequence[str]], Sequence[int]]

# How many dropped rows are listed by number.
_NAMED: Final = 5
_EMPTY: Final = "empty"
# Fields that predefined workflows, predefined rewards and demonstrations read: they count as used
# even without `columns`.
_READY: Final = frozenset(
    ("messages", "prompt", "question", "answer", "completion", "chosen", "rejected", "tools")
)
_DUPLICATE: Final = "duplicates"


@dataclass(frozen=True)
class RowsReport:
    """Counts and examples of kept and dropped rows of a data set."""

    source: str
    """The data set and its split."""
    total: int
    dropped: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """By reason: the number of rows, and the indices of the first ones, counted from 0."""
    left_out: tuple[str, ...] = ()
    """Columns with values without a JSON form, which `columns` does not name."""

    @property
    def kept(self) -> int:
        """Number of rows that are left."""
        return self.total - sum(count for count, _ in self.dropped.values())

    def __str__(self) -> str:
        parts = [
            f"{count:,} {reason} ({_numbers(count, rows)})"
            for reason, (count, rows) in self.dropped.items()
        ]
        of = f", dropped: {'; '.join(parts)}" if parts else ""
        if self.left_out:
            left_out = ", ".join(self.left_out)
            of += f"; without the columns {left_out}, which have no JSON form"
        return f"{self.source}: {self.kept:,} of {self.total:,} rows{of}"


def _numbers(count: int, rows: Sequence[int]) -> str:
    more = ", ..." if count > len(rows) else ""
    return f"row{'s' if count > 1 else ''} {', '.join(map(str, rows))}{more}"


@dataclass(frozen=True)
class _Fields:
    """The conversion of a table's row to a query."""

    paths: Mapping[str, Sequence[str]]
    """By field, the column and the path into it; empty: every column is a field."""
    left_out: Collection[str] = ()
    """Columns that are not fields."""

    def of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a row. NaN, which marks a missing number in tables, becomes None."""
        given = (
            {name: _inside(row, path) for name, path in self.paths.items()}
            if self.paths
            else {name: value for name, value in row.items() if name not in self.left_out}
        )
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in given.items()
        }


class DataRows:
    """The kept rows of a data set: `rows[i]` is a dict of fields, read from disk on access."""

    def __init__(
        self,
        table: Table,
        fields: _Fields,
        kept: NDArray[np.int32] | None,
        report: RowsReport,
        digests: NDArray[np.uint64],
    ) -> None:
        """Select rows. `kept`: row numbers; None: all. `digests`: a hash of each kept row's
        fields."""
        self._table = table
        self._fields = fields
        self._kept = kept
        self.report = report
        self.digests = digests

    def __len__(self) -> int:
        return len(self._table) if self._kept is None else len(self._kept)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        at = index if self._kept is None else int(self._kept[index])
        [row] = self._table.read(at, at + 1)
        return self._fields.of(row)

    def where(self, mask: NDArray[np.bool_]) -> DataRows:
        """Return the rows for which `mask` is true."""
        found = np.flatnonzero(mask).astype(np.int32)
        kept = found if self._kept is None else self._kept[found]
        return DataRows(self._table, self._fields, kept, self.report, self.digests[found])


def load_rows(
    spec: RowsSpec, field: str, *, split: str | None = None, count_tokens: CountTokens | None = None
) -> DataRows:
    """Return the rows of a data set, in its own order. Blocking; downloads and converts at first
    use.

    `field`: the section of the job, for errors. `split`: replaces `spec.split`, or, if it is a
    file, `spec.dataset`. `count_tokens`: required for `max_tokens`. Raises `DataError`.
    """
    table = open_table(spec, field, split)
    source = split if split and reader_of(split) else spec.dataset
    name = source if reader_of(source) else f"{source} {split or spec.split or 'train'}"
    paths = _paths(table, spec, field)
    used = {path[0] for path in paths.values()} or _READY
    for column, why in table.unreadable.items():
        if column in used:
            raise DataError(
                f"column '{column}' of {name} has {why}",
                kind="not_json",
                field=f"{field}.columns.{column}",
                value=column,
                remedy=READABLE,
            )
    if paths:
        table = table.only(list(dict.fromkeys(path[0] for path in paths.values())))
    fields, checked = _Fields(paths), _RowCheck(spec, count_tokens)
    begin = 0
    while begin < len(table):
        try:
            checked.add([fields.of(row) for row in table.read(begin, begin + BATCH)])
            begin += BATCH
        except _NoJsonError as error:
            if error.name in {*spec.columns, *spec.max_characters, *spec.max_tokens, *_READY}:
                raise _not_json(error, spec, f"{field}.columns.{error.name}", name) from error
            # The job does not name this column: check the rows again without it.
            fields = _Fields(paths, {*fields.left_out, error.name})
            begin, checked = 0, _RowCheck(spec, count_tokens)
    dropped, kept, digests = checked.result()
    left_out = {*fields.left_out, *(() if paths else table.unreadable)}
    report = RowsReport(name, len(table), dropped, tuple(sorted(left_out)))
    if not report.kept:
        raise DataError(
            f"no rows are left. {report}",
            kind="no_rows",
            field=f"{field}.dataset",
            value=source,
            remedy="Check its rows, `columns`, `max_characters` and `max_tokens`.",
        )
    return DataRows(table, fields, None if len(kept) == len(table) else kept, report, digests)


class _NoJsonError(Exception):
    """Field `name` of row `row` has no JSON form."""

    def __init__(self, name: str, row: int, why: str) -> None:
        super().__init__(why)
        self.name, self.row = name, row


def _not_json(error: _NoJsonError, spec: RowsSpec, field: str, source: str) -> DataError:
    column = spec.columns.get(error.name, error.name)
    return DataError(
        f"column '{column}' of {source} has a value in row {error.row} that cannot be written as "
        "JSON: "
        f"{error}",
        kind="not_json",
        field=field,
        value=column,
        remedy="Write it as text or as a finite number, or name the other columns in `columns`.",
    )


class _RowCheck:
    """A check of all rows, batch by batch, for rows that are empty, too long, or duplicates."""

    def __init__(
        self,
        spec: RowsSpec,
        count_tokens: CountTokens | None,
    ) -> None:
        assert count_tokens is not None or not spec.max_tokens, "a tokenizer counts tokens"
        self._spec = spec
        self._count_tokens = count_tokens
        self._rows = 0
        self._dropped: dict[str, tuple[int, list[int]]] = {}
        self._good: list[NDArray[np.int32]] = []
        self._digests: list[NDArray[np.uint64]] = []

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Check the next rows by their fields. Raises `_NoJsonError`."""
        digests = np.fromiter(
            (self._digest(row, number) for number, row in enumerate(rows, self._rows)),
            np.uint64,
            len(rows),
        )
        # A row must have all fields of `columns`; without `columns`, one field.
        lacks = any if self._spec.columns else all
        empty = [lacks(map(_is_empty, row.values())) for row in rows]
        good = np.ones(len(rows), dtype=bool)
        self._drop(_EMPTY, good, np.array(empty, dtype=bool))
        for name, most in self._spec.max_characters.items():
            lengths = np.array([len(content_of(row.get(name))) for row in rows])
            self._drop(f"with more than {most:,} characters of {name}", good, lengths > most)
        for name, most in self._spec.max_tokens.items():
            assert self._count_tokens is not None, "checked"
            left = np.flatnonzero(good)
            long = np.zeros(len(rows), dtype=bool)
            if len(left):
                texts = [content_of(rows[at].get(name)) for at in left.tolist()]
                long[left] = np.asarray(self._count_tokens(texts)) > most
            self._drop(f"with more than {most:,} tokens of {name}", good, long)
        kept = np.flatnonzero(good)
        self._good.append((kept + self._rows).astype(np.int32))
        self._digests.append(digests[kept])
        self._rows += len(rows)

    def _digest(self, row: Mapping[str, Any], number: int) -> int:
        """Return a hash of the row's JSON, which tells 1 from "1" and null from a missing key."""
        try:
            text = _json(row)
            if text.count("[") + text.count("{") > JSON_DEPTH:
                json_text(row)
        except (TypeError, ValueError, RecursionError, NotJsonError):
            raise _no_json(row, number) from None
        return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))

    def result(
        self,
    ) -> tuple[dict[str, tuple[int, tuple[int, ...]]], NDArray[np.int32], NDArray[np.uint64]]:
        """Return the dropped rows by reason, and the numbers and hashes of the kept rows."""
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

    def _drop(self, why: str, good: NDArray[np.bool_], bad: NDArray[np.bool_]) -> None:
        """Mark rows of the batch as dropped; a row counts under its first reason."""
        found = np.flatnonzero(good & bad)
        good[found] = False
        if len(found):
            count, rows = self._dropped.get(why, (0, []))
            rows += (found[: _NAMED - len(rows)] + self._rows).tolist()
            self._dropped[why] = (count + len(found), rows)


def content_of(value: Any) -> str:
    """Return the text that determines a value's length: the value itself, the contents of messages,
    else JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        return "\n".join(content_of(one.get("content")) for one in value)
    return "" if value is None else _json(value)


# Made once: `json.dumps` makes an encoder per call, which takes longer than encoding a row.
_json: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True).encode


def _no_json(row: Mapping[str, Any], number: int) -> _NoJsonError:
    for name, value in row.items():
        try:
            json_text(value)
        except NotJsonError as error:
            return _NoJsonError(name, number, f"{error}")
    raise AssertionError("a row has a JSON form if its fields have")


def _is_empty(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, list | dict) and not value)


def _inside(value: Any, path: Sequence[str]) -> Any:
    """Return the value at `path` inside `value`; None if a part is missing."""
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _paths(table: Table, spec: RowsSpec, field: str) -> dict[str, list[str]]:
    """Return, by field of `spec.columns`, the column and the path into it. Raises `DataError`."""
    try:
        return _found(spec, field, table.names(BATCH))
    except DataError:  # JSON rows may lack a key that later rows have
        return _found(spec, field, table.names(len(table)))


def _found(spec: RowsSpec, field: str, names: Names) -> dict[str, list[str]]:
    if not spec.columns:
        for bounds in ("max_characters", "max_tokens"):
            for name in getattr(spec, bounds):
                if name not in names:
                    raise _no_column(f"{field}.{bounds}.{name}", name, names)
    found = {}
    for name, column in spec.columns.items():
        path = [column] if column in names else column.split(".")
        known = names
        for part in path:
            if part not in known:
                raise _no_column(f"{field}.columns.{name}", column, known or names)
            known = known[part]
        found[name] = path
    return found


def _no_column(field: str, column: str, there: Collection[str]) -> DataError:
    return DataError(
        f"'{column}' is not a column of the data set",
        kind="column_missing",
        field=field,
        value=column,
        remedy=f"There are: {', '.join(there)}.",
    )
