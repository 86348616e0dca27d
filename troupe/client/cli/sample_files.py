"""Files of samples: Parquet or JSON Lines, complete or not there at all."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Protocol, Self

from troupe.client.table_records import Sample
from troupe.rpc.errors import FailedPrecondition, InvalidArgument

# Rows of a Parquet row group: enough to compress well, few enough to hold in memory.
_GROUP_ROWS: Final = 1000


class SampleWriter(Protocol):
    """A context manager that writes what is added; the file appears when it ends well."""

    def add(self, sample: Sample) -> None:
        """Write one row."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def writer_for(path: Path) -> SampleWriter:
    """By the file's suffix. Raises `InvalidArgument`, `FailedPrecondition` when it exists."""
    kinds: dict[str, type[_Jsonl] | type[_Parquet]] = {".jsonl": _Jsonl, ".parquet": _Parquet}
    kind = kinds.get(path.suffix)
    if kind is None:
        raise InvalidArgument(
            "is neither Parquet nor JSON Lines.",
            field="FILE",
            value=path,
            remedy="Name it FILE.parquet or FILE.jsonl.",
        )
    if path.exists():
        raise FailedPrecondition(
            "the file exists.", field="FILE", value=path, remedy="Choose another or remove it."
        )
    if not path.absolute().parent.is_dir():
        raise InvalidArgument(
            "its directory does not exist.",
            field="FILE",
            value=path,
            remedy=f"Make {path.absolute().parent} first.",
        )
    return kind(path)


class _File:
    """Writes beside the target and moves it there at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._scratch = path.with_name(f".{path.name}.{os.getpid()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
        if kind is None:
            self._scratch.replace(self._path)
        else:
            self._scratch.unlink(missing_ok=True)

    def _close(self) -> None:
        raise NotImplementedError


class _Jsonl(_File):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file: IO[str] = self._scratch.open("w")

    def add(self, sample: Sample) -> None:
        self._file.write(json.dumps(dataclasses.asdict(sample)) + "\n")

    def _close(self) -> None:
        self._file.close()


class _Parquet(_File):
    """One column per field; user-defined columns as one column of JSON."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise FailedPrecondition(
                "Parquet needs the package pyarrow, which is not installed.",
                field="FILE",
                value=path,
                remedy="pip install 'troupe[parquet]', or export to FILE.jsonl.",
            ) from error
        self._arrow = pyarrow
        text, number = pyarrow.string(), pyarrow.int64()
        ids = pyarrow.list_(pyarrow.int32())
        self._schema = pyarrow.schema(
            [
                *((name, text) for name in ("id", "policy", "query_id", "trajectory_id", "agent")),
                ("turn", number),
                ("group_id", text),
                ("state", text),
                ("reward", pyarrow.float64()),
                ("version", number),
                ("uses", number),
                ("prompt_ids", ids),
                ("response_ids", ids),
                ("logprobs", pyarrow.list_(pyarrow.float32())),
                ("columns", text),
            ]
        )
        self._writer = pyarrow.parquet.ParquetWriter(self._scratch, self._schema)
        self._rows: list[dict[str, Any]] = []

    def add(self, sample: Sample) -> None:
        fields = dataclasses.asdict(sample)
        self._rows.append({**fields, "columns": json.dumps(sample.columns)})
        if len(self._rows) >= _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            table = self._arrow.Table.from_pylist(self._rows, schema=self._schema)
            self._writer.write_table(table)
            self._rows = []

    def _close(self) -> None:
        self._flush()
        self._writer.close()
