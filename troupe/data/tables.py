"""Access to the unconverted rows of a data set: local files, or a data set of the Hugging Face hub.

The `datasets` library finds, downloads, decompresses and memory-maps the files. It would also infer
types: a text that looks like a date would become a timestamp, and 007 would become 7. Troupe
prevents that: JSON is read line by line as text and parsed by Python, and every CSV cell is text.
"""

from __future__ import annotations

import dataclasses
import filecmp
import glob
import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from troupe.functions import shipped
from troupe.job.section import no_directory
from troupe.job.sections.data import READERS, RowsSpec, reader_of
from troupe.outcomes import described, shown
from troupe.workflow.errors import WorkflowError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

# The names in a data set, each with the names of its parts.
Names = Mapping[str, "Names"]

_HUB_REMEDY: Final = (
    "Check the id; a private or gated data set needs HF_TOKEN where it is read. Without the hub: "
    "`hf download --repo-type dataset ID` beforehand, or name local files."
)
_TEXT: Final = "text"
# Messages of the library, pandas and pyarrow about a file without rows.
_WITHOUT_ROWS: Final = (
    "corresponds to no data",
    "No columns to parse from file",
    "BatchSize must be greater than 0",
)
_JSON_REMEDY: Final = "Write one JSON object per line, or the whole file as one array of objects."
READABLE: Final = "Write texts, numbers, lists or structs, of one type in all files."
"""The remedy for columns that cannot be read."""
# Separators of CSV files other than the comma.
_SEPARATORS: Final = (";", "\t", "|")
# Number of rows that are read together.
BATCH: Final = 4096
_SHORT_FLOATS: Final[Mapping[str, Callable[[float], object]]] = {
    "float16": np.float16,
    "float32": np.float32,
}


class DataError(WorkflowError):
    """Rows are not available: `kind` is `data_library_missing`, `dataset_missing`,
    `hub_unreachable`, `split_missing`, `split_overlap`, `column_missing`, `dataset_unreadable`,
    `not_json` or `no_rows`."""

    kind = "dataset_unreadable"


class Table(ABC):
    """The rows of a data set by number. They stay on disk until they are read."""

    def __init__(self, table: Dataset, lengths: Mapping[str, int] | None = None) -> None:
        """Wrap `table`. `lengths`: number of rows of each split; None: as the library reports."""
        self._table = table
        splits = table.info.splits or {}
        self.lengths = lengths or {name: one.num_examples for name, one in splits.items()}

        self.unreadable: Mapping[str, str] = {}
        """Columns that cannot be read, with the reasons; `read` omits them."""

    def __len__(self) -> int:
        return len(self._table)

    @abstractmethod
    def names(self, rows: int) -> Names:
        """Return the columns and their parts; for JSON, only of the first `rows` rows."""

    @abstractmethod
    def read(self, begin: int, end: int) -> list[dict[str, Any]]:
        """Return rows `begin` to `end`, with their original keys."""

    def only(self, columns: Sequence[str]) -> Table:
        """Return the same rows; columns other than `columns` need not be read."""
        return self


class ArrowTable(Table):
    """Rows of Parquet, CSV and other files with columns."""

    def __init__(self, table: Dataset, unreadable: Mapping[str, str] | None = None) -> None:
        super().__init__(table.with_format("arrow"))
        self.unreadable = unreadable or {}
        self._as_written = {
            name: convert
            for name, kind in table.features.items()
            if (convert := _as_written(kind)) is not None
        }

    def names(self, rows: int) -> Names:
        """Return the columns and their parts."""
        return {**_parts(self._table.features), **{name: {} for name in self.unreadable}}

    def read(self, begin: int, end: int) -> list[dict[str, Any]]:
        """Return rows `begin` to `end`."""
        rows: list[dict[str, Any]] = self._table[begin:end].to_pylist()
        for name, convert in self._as_written.items():
            for row in rows:
                row[name] = convert(row[name])
        return rows

    def only(self, columns: Sequence[str]) -> Table:
        """Return the same rows without the other columns."""
        return ArrowTable(self._table.select_columns(list(columns)))


def _parts(kind: Any) -> Names:
    import datasets

    if isinstance(kind, datasets.Translation):
        return {language: {} for language in kind.languages}
    return {name: _parts(part) for name, part in kind.items()} if isinstance(kind, Mapping) else {}


def _as_written(kind: Any, *, listed: bool = False) -> Callable[[Any], Any] | None:
    """Return a function that undoes Arrow's changes to values of a type; None: nothing to undo.

    All items of a list have the same keys in Arrow, which fills missing keys with nulls: tools of
    two shapes would each show the other's parameters as nulls. So nulls within items of lists are
    left out. The `Json` type keeps values as JSON text. A number with fewer bits than Python's
    becomes the shortest decimal that represents it: 0.1, although its exact value is 0.10000000149.
    """
    import datasets

    if isinstance(kind, datasets.Json):
        return lambda value: None if value is None else json.loads(value)
    if isinstance(kind, datasets.Value) and kind.dtype in _SHORT_FLOATS:
        short = _SHORT_FLOATS[kind.dtype]
        return lambda value: None if value is None else float(str(short(value)))
    if isinstance(kind, Mapping):
        parts = {name: _as_written(part, listed=listed) for name, part in kind.items()}
        if not listed and not any(parts.values()):
            return None

        def of_struct(value: Any) -> Any:
            if value is None:
                return None
            return {
                name: convert(part) if (convert := parts[name]) is not None else part
                for name, part in value.items()
                if not (listed and part is None)
            }

        return of_struct
    item = getattr(kind, "feature", None)
    inner = None if item is None else _as_written(item, listed=True)
    if inner is None:
        return None
    return lambda value: None if value is None else [inner(one) for one in value]


class JsonTable(Table):
    """Rows of JSON: one text each, parsed when it is read, with Python's exact integers."""

    def __init__(
        self, texts: Dataset, field: str, lengths: Mapping[str, int] | None = None
    ) -> None:
        """Wrap `texts`. `field`: the job's field, for errors."""
        super().__init__(texts, lengths)
        self._field = field

    def names(self, rows: int) -> Names:
        """Return the keys of the first `rows` rows and of the objects in them."""
        found: dict[str, Any] = {}
        for begin in range(0, rows, BATCH):
            for row in self.read(begin, min(rows, begin + BATCH)):
                _collect(row, found)
        return found

    def read(self, begin: int, end: int) -> list[dict[str, Any]]:
        """Return rows `begin` to `end`; a blank line is a row without keys. Raises `DataError`."""
        lines = self._table[begin:end][_TEXT]
        return [self._parsed(number, line) for number, line in enumerate(lines, begin)]

    def _parsed(self, number: int, line: str) -> dict[str, Any]:
        if not line.strip():
            return {}
        try:
            row = _decode(line)
        except (ValueError, RecursionError) as error:
            raise self._no_object(number, described(error), line) from error
        if not isinstance(row, dict):
            raise self._no_object(number, f"its type is {type(row).__name__}", line)
        return row

    def _no_object(self, number: int, why: str, line: str) -> DataError:
        return DataError(
            f"row {number} is not a JSON object: {why}",
            field=self._field,
            value=line[:100],
            remedy=_JSON_REMEDY,
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {shown(twice)} appears twice in one object")
    return found


# Python's decoder, except that it refuses two values of one key instead of taking the last.
_decode: Final = json.JSONDecoder(object_pairs_hook=_object).decode


def _collect(row: Mapping[str, Any], names: dict[str, Any]) -> None:
    for name, value in row.items():
        parts = names.setdefault(name, {})
        if isinstance(value, Mapping):
            _collect(value, parts)


def open_table(spec: RowsSpec, field: str, split: str | None = None) -> Table:
    """Return the unconverted rows of `spec`. Blocking; downloads and converts at first use.

    `field`: the section of the job, for errors. `split`: held-out rows, a split that replaces
    `spec.split` or a file that replaces `spec.dataset`; they must not be among the training rows.
    Raises `DataError`.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"the library `datasets` cannot be imported: {error}",
            kind="data_library_missing",
            field=f"{field}.dataset",
            value=spec.dataset,
            remedy='`pip install "troupe-rl[data]"` where rollout workers (and trainers) run.',
        ) from error
    datasets.disable_progress_bars()
    # Otherwise each call contacts the hub, even for local files.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    source = split if split and reader_of(split) else spec.dataset
    reader = reader_of(source)
    where = f"{field}.held_out" if source != spec.dataset else f"{field}.dataset"
    wanted = "train" if reader else split or spec.split or "train"
    if not reader and os.path.isfile(source):
        raise DataError(
            "files with this extension cannot be read",
            kind="dataset_missing",
            field=where,
            value=source,
            remedy=f"Supported: {', '.join(READERS)}; compressed (.gz, .bz2, .xz, .zst) all but "
            "Parquet and Arrow, which compress their columns themselves.",
        )
    if (reader and not files_of(source)) or (not reader and no_directory(source)):
        raise DataError(
            "there is no such file or folder",
            kind="dataset_missing",
            field=where,
            value=source,
            remedy="The path is on the host that reads it, relative to the directory in which "
            "its service was started, or to the files that the job sends (`code`).",
        )
    if source != spec.dataset:
        check_files_apart(field, source, spec.dataset)
    try:
        if reader:
            more = {"sep": "\t"} if ".tsv" in Path(source.lower()).suffixes else {}
            # The library treats a path with brackets or stars as a pattern.
            found = files_of(source)
            files = glob.escape(found[0]) if len(found) == 1 else sent_or_here(source)
            builder = datasets.load_dataset_builder(reader, data_files=files, **more)
        else:
            builder = _hub_builder(source, spec)
        table = _open(builder, wanted, where)
        shared = 0
        if split and source == spec.dataset and table.lengths:
            shared = _shared_rows(table.lengths, spec.split or "train", split)
    except DataError:
        raise
    except Exception as error:  # pyarrow, pandas, fsspec and the hub raise their own
        of_split = f"{field}.{'held_out' if split else 'split'}", wanted
        raise _explained(error, spec, field, (where, source), of_split) from error
    if split and shared:
        raise _overlap(field, split, f"{shared:,} of its rows are also in the training split")
    return table


def _hub_builder(source: str, spec: RowsSpec) -> DatasetBuilder:
    """Return the builder of a folder or of a data set of the hub. Without the hub, use the files
    downloaded earlier, rather than the library's rows, whose types it inferred."""
    import datasets
    from datasets.packaged_modules.cache.cache import Cache
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def downloaded() -> DatasetBuilder:
        folder = snapshot_download(
            source, repo_type="dataset", revision=spec.revision, local_files_only=True
        )
        return datasets.load_dataset_builder(folder, spec.config)

    try:
        found = datasets.load_dataset_builder(source, spec.config, revision=spec.revision)
    except ConnectionError as error:
        try:
            return downloaded()
        except LocalEntryNotFoundError:
            raise error from None
    if isinstance(found, Cache):
        with suppress(LocalEntryNotFoundError):
            return downloaded()
    return found


def _open(builder: DatasetBuilder, split: str, field: str) -> Table:
    """Return the rows of a split. JSON is opened as text, CSV with text cells."""
    from datasets.packaged_modules.arrow.arrow import Arrow
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.json.json import Json
    from datasets.packaged_modules.parquet.parquet import Parquet

    if isinstance(builder, Json):
        return _open_json(builder.config.data_files, split, field)
    if isinstance(builder, Csv) and builder.config.features is None:
        return _open_csv(builder, split, field)
    if isinstance(builder, Parquet | Arrow) and builder.config.features is None:
        files = [file for of_split in builder.config.data_files.values() for file in of_split]
        if all(map(os.path.isfile, files)):
            return _open_typed(builder, files, split, field)
    builder.download_and_prepare()
    return ArrowTable(builder.as_dataset(split=split))


def _open_json(files: Mapping[Any, Any], split: str, field: str) -> JsonTable:
    import datasets

    read = partial(
        datasets.load_dataset,
        _TEXT,
        data_files=files,
        encoding="utf-8-sig",
        features=datasets.Features({_TEXT: datasets.Value("string")}),
    )
    lines = read(split=split)
    first = next((line for line in lines[_TEXT] if line.strip()), "{}")
    if not _begins_document(first):
        return JsonTable(lines, field)
    # Each file is one value: an array of rows, or a single row. All must fit into memory.
    rows: dict[str, list[Any]] = {}
    for name, documents in read(sample_by="document").items():
        values = [_decoded(document, field) for document in documents[_TEXT]]
        rows[name] = [row for one in values for row in (one if isinstance(one, list) else [one])]
    lengths = {name: len(own) for name, own in rows.items()}
    parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    chosen = [row for part in parts for row in rows[part.splitname][part.from_ : part.to]]
    texts = datasets.Dataset.from_dict({_TEXT: [json.dumps(row) for row in chosen]})
    return JsonTable(texts, field, lengths)


def _begins_document(line: str) -> bool:
    """Return whether a file whose first line is `line` is one JSON value, not an object per line:
    the line begins an array, or its value continues on the next line."""
    try:
        return isinstance(json.loads(line), list)
    except json.JSONDecodeError as error:
        return error.pos >= len(line.rstrip())
    except (ValueError, RecursionError):
        return line.lstrip().startswith("[")


def _decoded(document: str, field: str) -> Any:
    try:
        return _decode(document)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"a file is not JSON: {described(error)}",
            field=field,
            value=document[:100],
            remedy=_JSON_REMEDY,
        ) from error


def _open_csv(builder: DatasetBuilder, split: str, field: str) -> ArrowTable:
    """Open CSV with all cells as text. Cells are separated by commas, or by the semicolons, tabs or
    bars of a header without commas."""
    import datasets
    import pandas  # type: ignore[import-untyped]

    common = {one.name for one in dataclasses.fields(datasets.BuilderConfig)}
    chosen = {
        one.name: getattr(builder.config, one.name)
        for one in dataclasses.fields(builder.config)
        if one.name not in common and getattr(builder.config, one.name) != one.default
    }
    # Without `index_col` a first row that is longer than the header shifts all cells.
    as_text = {"encoding": "utf-8-sig", **chosen, "na_filter": False, "index_col": False}
    data_files = builder.config.data_files
    files = [file for of_split in data_files.values() for file in of_split]
    options = {**builder.config.pd_read_csv_kwargs, **as_text, "chunksize": None, "nrows": 0}
    header = list(pandas.read_csv(files[0], **options).columns)
    separators = [one for one in _SEPARATORS if one in header[0]] if len(header) == 1 else []
    if separators and not {"sep", "delimiter"} & chosen.keys():
        as_text["sep"] = options["sep"] = separators[0]
        header = list(pandas.read_csv(files[0], **options).columns)
    if not {"names", "header"} & chosen.keys():
        for file in filter(os.path.isfile, files):
            _check_header(file, header, options, field)
    features = datasets.Features({name: datasets.Value("string") for name in header})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Length of header or names does not match")
        return ArrowTable(
            datasets.load_dataset(
                "csv", data_files=data_files, split=split, features=features, **as_text
            )
        )


def _check_header(file: str, header: Sequence[str], options: Mapping[str, Any], field: str) -> None:
    """Raise `DataError` if a CSV file has two columns of one name, or others than `header`."""
    import pandas

    own = pandas.read_csv(file, **options).columns
    if {*own} != {*header}:
        raise DataError(
            f"its files have different columns: {', '.join(header)}; but {file}: {', '.join(own)}",
            field=field,
            value=file,
            remedy="Write the same header into all files, with one separator.",
        )
    # pandas renames the second column of a name.
    row = pandas.read_csv(file, **{**options, "header": None, "nrows": 1, "dtype": str})
    written = [str(cell) for cell in row.iloc[0]] if len(row) else []
    if twice := [name for name in written if name and written.count(name) > 1]:
        raise DataError(
            f"the column {shown(twice[0])} appears twice",
            field=field,
            value=file,
            remedy="Give every column a name of its own.",
        )


def _open_typed(
    builder: DatasetBuilder, files: Sequence[str], split: str, field: str
) -> ArrowTable:
    """Open local Parquet or Arrow files. The library would convert the values of further files to
    the types of the first one ("007" to 7, and 7 to "7"), and read no file that has a map."""
    import datasets
    import pyarrow as pa
    from datasets.packaged_modules.parquet.parquet import Parquet

    schemas = {file: _schema_of(file) for file in files}
    kinds: dict[str, tuple[Any, str]] = {}
    unreadable: dict[str, str] = {}
    for file, schema in schemas.items():
        for own in schema:
            kind, first = kinds.get(own.name, (own.type, file))
            merged = _merged(kind, own.type)
            kinds[own.name] = merged or kind, first
            if merged is None:
                unreadable[own.name] = f"the type {kind} in {first}, but {own.type} in {file}"
            elif not _is_known(merged):
                unreadable[own.name] = f"the type {merged}, which cannot be read"
    if unreadable:  # then the library reads only columns that all files have
        for file, schema in schemas.items():
            for name in kinds.keys() - {*schema.names} - unreadable.keys():
                unreadable[name] = f"no values in {file}"
    if unreadable or any(not schema.equals(schemas[files[0]]) for schema in schemas.values()):
        columns = [name for name in kinds if name not in unreadable]
        of_parquet = isinstance(builder, Parquet)
        if not columns or (unreadable and not of_parquet):  # Arrow files are read with all columns
            reasons = (f"{name} has {why}" for name, why in unreadable.items())
            raise DataError(
                f"columns cannot be read: {'; '.join(reasons)}",
                field=field,
                value=files[0],
                remedy=READABLE,
            )
        whole = pa.schema([(name, kinds[name][0]) for name in columns])
        builder = datasets.load_dataset_builder(
            "parquet" if of_parquet else "arrow",
            data_files=builder.config.data_files,
            **({"columns": columns} if unreadable else {}),
            features=datasets.Features.from_arrow_schema(whole),
        )
    builder.download_and_prepare()
    return ArrowTable(builder.as_dataset(split=split), unreadable)


def _schema_of(file: str) -> Any:
    """Return the Arrow schema of a Parquet or Arrow file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open(file, "rb") as opened:
        begin = opened.read(4)
    if begin == b"PAR1":
        return pq.read_schema(file)
    with pa.memory_map(file) as source:
        return (pa.ipc.open_file if begin == b"ARRO" else pa.ipc.open_stream)(source).schema


def _merged(one: Any, other: Any) -> Any:
    """Return the Arrow type that holds values of both without changing any; None if there is
    none."""
    import pyarrow as pa

    if one == other:
        return one
    # Encoded by a dictionary or not, values are the same.
    plain = [k.value_type if pa.types.is_dictionary(k) else k for k in (one, other)]
    try:
        schemas = [pa.schema([("", kind)]) for kind in plain]
        found = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None
    return found if all(_holds(found, kind) for kind in plain) else None


def _holds(merged: Any, kind: Any) -> bool:
    """Return whether values of `kind` keep their JSON form as values of `merged`."""
    from pyarrow import types

    if types.is_null(kind) or merged == kind:
        return True
    if types.is_struct(merged) and types.is_struct(kind):
        return all(_holds(merged.field(part.name).type, part.type) for part in kind)
    if types.is_nested(merged) and types.is_nested(kind):
        inner = [getattr(k, "value_type", None) for k in (merged, kind)]
        return None not in inner and _holds(*inner)
    alike = (types.is_integer, types.is_timestamp, types.is_decimal)
    text = (types.is_string, types.is_large_string)
    return any(of(merged) and of(kind) for of in alike) or all(
        any(of(k) for of in text) for k in (merged, kind)
    )


def _is_known(kind: Any) -> bool:
    """Return whether the library reads columns of an Arrow type; it does not read maps."""
    import datasets
    import pyarrow as pa

    try:
        datasets.Features.from_arrow_schema(pa.schema([("", kind)]))
    except ValueError:
        return False
    return True


def files_of(source: str) -> list[str]:
    """Return the local files of a data set: the file of this name, else the files that match the
    pattern."""
    source = sent_or_here(source)
    return [source] if os.path.isfile(source) else sorted(glob.glob(source))


def sent_or_here(source: str) -> str:
    """Return the path or pattern of files that the current job sends (`code`) if it names some,
    else `source` itself."""
    code = shipped.current()
    if code is None or os.path.isabs(source):
        return source
    if os.path.isfile(sent := os.path.join(code.folder, source)):
        return sent
    pattern = os.path.join(glob.escape(str(code.folder)), source)
    return pattern if glob.glob(pattern) else source


def check_files_apart(field: str, held_out: str, training: str) -> None:
    """Raise `DataError` if a file of `held_out` is a file of `training`, or a copy of one."""
    if not reader_of(held_out) or not reader_of(training):
        return
    known: dict[int, list[str]] = {}
    for path in files_of(training):
        known.setdefault(os.path.getsize(path), []).append(path)
    for path in files_of(held_out):
        # Most files differ in size, so few are read.
        for other in known.get(os.path.getsize(path), ()):
            if os.path.samefile(path, other):
                raise _overlap(field, held_out, f"{path} is one of the files `{training}`")
            if filecmp.cmp(path, other, shallow=False):
                raise _overlap(field, held_out, f"{path} is a copy of {other}")


def _shared_rows(lengths: Mapping[str, int], training: str, held_out: str) -> int:
    """Return how many rows two splits, or parts of splits, have in common."""
    from datasets import ReadInstruction

    ours, theirs = (
        ReadInstruction.from_spec(split).to_absolute(dict(lengths))
        for split in (training, held_out)
    )
    return sum(
        max(0, min(one.to, other.to) - max(one.from_, other.from_))
        for one in ours
        for other in theirs
        if one.splitname == other.splitname
    )


def _overlap(field: str, held_out: str, why: str) -> DataError:
    return DataError(
        f"held-out rows must not be training rows: {why}",
        kind="split_overlap",
        field=f"{field}.held_out",
        value=held_out,
        remedy="Name another split or file, or give a fraction (0.05) of the rows.",
    )


def _explained(
    error: Exception,
    spec: RowsSpec,
    field: str,
    of_source: tuple[str, str],
    of_split: tuple[str, str],
) -> DataError:
    """Return the `DataError` for an error of the `datasets` library. `of_source`, `of_split`: field
    and value of source and split."""
    from datasets.exceptions import DatasetNotFoundError

    kinds: list[tuple[bool, str, tuple[str, object], str]] = [
        (
            any(one in str(error.__cause__ or error) for one in _WITHOUT_ROWS),
            "no_rows",
            of_source,
            "Add rows.",
        ),
        (isinstance(error, ConnectionError), "hub_unreachable", of_source, _HUB_REMEDY),
        (
            isinstance(error, DatasetNotFoundError) and str(error).startswith("Revision"),
            "dataset_missing",
            (f"{field}.revision", spec.revision),
            "Name a commit, branch or tag of the data set.",
        ),
        (isinstance(error, FileNotFoundError), "dataset_missing", of_source, _HUB_REMEDY),
        (
            isinstance(error, ValueError) and "data file format" in str(error),
            "dataset_unreadable",
            of_source,
            "Name files of one kind, as in `FOLDER/*.jsonl`.",
        ),
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
        remedy="Check its contents (text must be UTF-8). The `datasets` library, which reads it, "
        "writes "
        "its cache below HF_HOME.",
    )
