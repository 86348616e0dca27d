"""Values of data files: they reach a query as they were written, or are refused."""

from __future__ import annotations

import bz2
import csv
import datetime
import decimal
import gzip
import io
import json
import lzma
import math
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.rollout.trajectories.queries import QuerySource
from tests.workflow.stage import TOOLED, make_chat
from troupe.data.demonstrations import demonstrations_of
from troupe.data.rows import DataRows, load_rows
from troupe.data.tables import DataError
from troupe.data.tasks import open_tasks
from troupe.job import RowsSpec, TasksSpec
from troupe.job.sections.data import JobTasksSpec
from troupe.outcomes import json_text
from troupe.workflow import Role, Sampling

Write = Callable[[str, str | bytes], str]
# Texts that readers of tables like to turn into something else.
TEMPTING = [
    *("2024-01-05", "2024-01-05T10:00:00Z", "12:30", "007", "1.50", "1e5", "NA", "null", "None"),
    *("nan", "inf", "true", "False", "123456789012345678901234567890", " x ", "0x1F", "1,5", "-"),
]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file; returns its path."""

    def written(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return written


@pytest.fixture
def fresh(write: Write) -> Callable[[str, str], str]:
    """Writes each file under a new name: the examples of one property share a folder."""
    numbers = count()
    return lambda name, content: write(f"{next(numbers)}-{name}", content)


def load(path: str, **spec: Any) -> DataRows:
    return load_rows(RowsSpec(dataset=path, duplicates="keep", **spec), "tasks")


def all_of(rows: DataRows) -> list[dict[str, Any]]:
    return [rows[index] for index in range(len(rows))]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def comma_separated(rows: list[dict[str, str]], separator: str = ",") -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), delimiter=separator, quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(TEMPTING)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner),
    max_leaves=6,
)
_EXAMPLES = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@_EXAMPLES
@given(
    rows=st.lists(
        st.dictionaries(st.sampled_from("abc"), _JSON).map(lambda row: {"id": "x", **row}),
        min_size=1,
        max_size=4,
    ),
    kind=st.sampled_from(["lines", "array"]),
)
def test_a_row_of_json_is_read_as_written(
    fresh: Callable[[str, str], str], rows: list[dict[str, Any]], kind: str
) -> None:
    path = (
        fresh("rows.jsonl", lines(rows))
        if kind == "lines"
        else fresh("rows.json", json.dumps(rows, indent=1))
    )
    found = all_of(load(path))
    # Compared as JSON: 1, 1.0 and true are equal in Python.
    assert [json_text(row) for row in found] == [json_text(row) for row in rows]


@_EXAMPLES
@given(
    cells=st.lists(
        st.lists(
            st.sampled_from(TEMPTING)
            | st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=1)
            | st.just("two\r\nlines\nand a half"),
            min_size=2,
            max_size=2,
        ),
        min_size=1,
        max_size=5,
    ),
    separator=st.sampled_from([",", "\t"]),
)
def test_a_cell_of_csv_is_its_text(
    fresh: Callable[[str, str], str], cells: list[list[str]], separator: str
) -> None:
    rows = [dict(zip(("id", "answer"), row, strict=True)) for row in cells]
    path = fresh("rows.tsv" if separator == "\t" else "rows.csv", comma_separated(rows, separator))
    kept = [row for row in rows if any(cell.strip() for cell in row.values())]
    assert all_of(load(path)) == kept


def test_csv_numbers_keep_their_digits(write: Write) -> None:
    content = "id,answer\r\n007,1.50\r\n1,2.5\r\n123456789012345678901234567890,NA\r\n"
    path = write("rows.csv", content)
    assert all_of(load(path, columns={"id": "id", "answer": "answer"})) == [
        {"id": "007", "answer": "1.50"},
        {"id": "1", "answer": "2.5"},
        {"id": "123456789012345678901234567890", "answer": "NA"},
    ]


def test_dates_in_json_lines_are_text(write: Write) -> None:
    rows = [{"question": "when?", "answer": "2024-01-05", "created": "2024-01-05T10:00:00"}]
    assert all_of(load(write("rows.jsonl", lines(rows)))) == rows


def test_a_byte_order_mark_and_blank_lines_are_skipped(write: Write) -> None:
    assert all_of(load(write("a.jsonl", '\ufeff{"q": "1"}\r\n\r\n{"q": "2"}\r\n'))) == [
        {"q": "1"},
        {"q": "2"},
    ]
    assert all_of(load(write("a.csv", "\ufeffq,r\r\n1,2\r\n"))) == [{"q": "1", "r": "2"}]


@pytest.mark.parametrize(("end", "pack"), [("gz", gzip), ("bz2", bz2), ("xz", lzma)])
def test_compressed_files_are_read(write: Write, end: str, pack: Any) -> None:
    rows = [{"id": "007", "answer": "2024-01-05"}]
    packed = pack.compress(lines(rows).encode())
    assert all_of(load(write(f"rows.jsonl.{end}", packed))) == rows
    packed = pack.compress(comma_separated(rows).encode())
    assert all_of(load(write(f"rows.csv.{end}", packed))) == rows


def test_files_in_a_folder_are_read_as_written_too(write: Write, tmp_path: Path) -> None:
    rows = [{"a": "2024-01-05"}, {"a": 1, "b": None}, {"a": 1.5}, {"a": "x"}]
    write("lines/train.jsonl", lines(rows))
    write("array/train.json", json.dumps(rows))
    write("cells/train.csv", "a,b\n007,NA\n")
    write("tabs/train.tsv", "a\tb\n007\tNA\n")
    for name in ("lines", "array"):
        assert all_of(load(str(tmp_path / name), split="train[:75%]")) == rows[:3], name
    for name in ("cells", "tabs"):
        assert all_of(load(str(tmp_path / name))) == [{"a": "007", "b": "NA"}], name


@pytest.mark.parametrize("prepared", [False, True])
def test_without_the_hub_downloaded_files_are_read_as_written(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepared: bool
) -> None:
    """As written by `hf download`. The library's own copy of the rows has inferred types."""
    rows = [{"question": "when?", "answer": "2024-01-05T10:00:00"}]
    commit = "0" * 40
    files = tmp_path / "hub" / "datasets--someone--dates"
    for path, text in (("refs/main", commit), (f"snapshots/{commit}/train.jsonl", lines(rows))):
        (files / path).parent.mkdir(parents=True)
        (files / path).write_text(text)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    if prepared:
        folder = tmp_path / "cache" / "someone___dates" / "default" / "0.0.0" / "hash"
        folder.mkdir(parents=True)
        datasets.DatasetInfo(dataset_name="dates", config_name="default").write_to_directory(folder)
    assert all_of(load("someone/dates")) == rows


def test_rows_that_json_distinguishes_are_not_duplicates(write: Write) -> None:
    rows = [{"a": 1}, {"a": "1"}, {"a": 1.0}, {"a": True}, {"a": 1, "b": None}, {"a": 1}]
    path = write("rows.jsonl", lines(rows))
    assert all_of(load_rows(RowsSpec(dataset=path), "tasks")) == rows[:-1]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"q": 1}\n{"q": \n', "row 1 is not a JSON object"),
        ("a.jsonl", '{"q": 1}\n[1]\n', "row 1 is not a JSON object: its type is list"),
        ("a.json", "[1, 2]", "row 0 is not a JSON object: its type is int"),
        ("a.json", '[{"q": 1}', "a file is not JSON"),
        ("a.jsonl", '[{"q": 1}]\n[{"q": 2}]\n', "a file is not JSON: .*Extra data"),
        ("a.jsonl", '# rows\n{"q": 1}\n', "row 0 is not a JSON object"),
        ("a.jsonl", '{"q": "cut\n', "row 0 is not a JSON object"),
        ("a.jsonl", '{"q": 1,}\n', "row 0 is not a JSON object"),
        ("a.jsonl", '{"q": ' + "9" * 5000 + "}", "row 0 is not a JSON object: .*4300 digits"),
        ("a.jsonl", '{"q": ' + "[" * 10**5, "row 0 is not a JSON object: RecursionError"),
        ("a.jsonl", '{"q": 1}\n{"q": 1, "r": {"s": 1, "s": 2}}\n', "row 1 .* 's' appears twice"),
        ("a.json", '[{"q": 1, "q": 2}]', "'q' appears twice"),
        ("a.csv", "a,b\n1,2,3\n", "Length of header or names does not match"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", "Expected 2 fields in line 3, saw 3"),
        ("a.csv", "a,b\n\u00e9,2\n".encode("latin-1"), "UnicodeDecodeError"),
    ],
)
def test_a_row_that_cannot_be_parsed_is_named(
    write: Write, name: str, content: str | bytes, said: str
) -> None:
    with pytest.raises(DataError, match=said) as caught:
        load(write(name, content))
    assert (caught.value.kind, caught.value.field) == ("dataset_unreadable", "tasks.dataset")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", ""),
        ("a.jsonl", "\n\n"),
        ("a.json", "[]"),
        ("a.csv", "q,r\n"),
        ("a.csv", ""),
        ("a.parquet", None),
    ],
)
def test_a_file_without_rows_is_refused_as_such(
    write: Write, tmp_path: Path, name: str, content: str | None
) -> None:
    path = parquet(tmp_path, {"q": pa.array([], pa.string())})
    with pytest.raises(DataError) as caught:
        load(path if content is None else write(name, content))
    assert (caught.value.kind, caught.value.field) == ("no_rows", "tasks.dataset")


@pytest.mark.parametrize("content", ['{"q": 1,\n "r": 2}', '{\n"q": 1, "r": 2\n}\n'])
def test_a_json_object_of_several_lines_is_one_row(write: Write, content: str) -> None:
    assert all_of(load(write("a.json", content))) == [{"q": 1, "r": 2}]


@pytest.mark.parametrize(
    "name", ["a.JSONL", "a.ndjson", "a[1].jsonl", "a (1) \u00e9.Jsonl", "*.jsonl"]
)
def test_a_file_is_found_by_any_name_with_a_known_ending(write: Write, name: str) -> None:
    assert all_of(load(write(name, '{"q": "007"}\n'))) == [{"q": "007"}]


def test_a_folder_of_several_kinds_of_files_is_refused_as_such(
    write: Write, tmp_path: Path
) -> None:
    write("mixed/train.jsonl", '{"q": 1}\n')
    write("mixed/test.csv", "q\n1\n")
    with pytest.raises(DataError, match="files of one kind") as caught:
        load(str(tmp_path / "mixed"))
    assert (caught.value.kind, caught.value.field) == ("dataset_unreadable", "tasks.dataset")


@pytest.mark.parametrize("name", ["rows.txt", "rows.parquet.gz", "rows.arrow.zst"])
def test_a_file_with_another_ending_is_not_said_to_be_missing(write: Write, name: str) -> None:
    with pytest.raises(DataError, match="with this extension cannot be read") as caught:
        load(write(name, "a"))
    assert (caught.value.kind, caught.value.field) == ("dataset_missing", "tasks.dataset")


def parquet(tmp_path: Path, columns: Mapping[str, Any]) -> str:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(dict(columns)), path)
    return str(path)


WITHOUT_JSON = {
    "timestamp": [None, datetime.datetime(2024, 1, 5)],
    "date": [None, datetime.date(2024, 1, 5)],
    "time": [None, datetime.time(12)],
    "decimal": [None, decimal.Decimal("1.50")],
    "bytes": [None, b"raw"],
    "infinity": [0.0, math.inf],
    "inside": [None, [{"when": datetime.datetime(2024, 1, 5)}]],
    "nan_inside": [None, [math.nan]],
}


@pytest.mark.parametrize("name", WITHOUT_JSON)
def test_a_value_without_a_json_form_is_refused_only_where_it_is_used(
    tmp_path: Path, name: str
) -> None:
    path = parquet(tmp_path, {"q": ["a", "b"], "other": WITHOUT_JSON[name]})
    assert all_of(load(path, columns={"q": "q"})) == [{"q": "a"}, {"q": "b"}]
    everything = load(path)
    assert all_of(everything) == [{"q": "a"}, {"q": "b"}]
    assert "without the columns other" in str(everything.report)
    with pytest.raises(DataError, match=r"column 'other' of .*rows.parquet has .* in row 1") as no:
        load(path, columns={"q": "q", "answer": "other"})
    assert (no.value.kind, no.value.field) == ("not_json", "tasks.columns.answer")
    with pytest.raises(DataError, match="'other'"):
        load(path, max_characters={"other": 100})


@pytest.mark.parametrize("name", ["answer", "messages", "tools"])
def test_a_field_that_ready_code_reads_is_used_without_columns(tmp_path: Path, name: str) -> None:
    path = parquet(tmp_path, {"q": ["a", "b"], name: WITHOUT_JSON["inside"]})
    with pytest.raises(DataError, match=f"column '{name}' .* in row 1") as caught:
        load(path)
    assert (caught.value.kind, caught.value.field) == ("not_json", f"tasks.columns.{name}")
    assert all_of(load(path, columns={"q": "q"})) == [{"q": "a"}, {"q": "b"}]


def test_a_number_too_large_for_a_float_is_refused_where_it_is_used(write: Write) -> None:
    path = write("rows.jsonl", '{"q": "a", "x": 1}\n{"q": "b", "x": 1e999}\n')
    assert all_of(load(path)) == [{"q": "a"}, {"q": "b"}]
    with pytest.raises(DataError, match="in row 1"):
        load(path, columns={"q": "q", "x": "x"})


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_a_number_of_few_bits_is_its_shortest_decimal(tmp_path: Path, kind: str) -> None:
    """`exact` compares by decimal value, and the double nearest to a float32 0.1 is not 0.1."""
    wanted = [0.1, 1.5, None, 1e-5, -0.0]
    numbers = [None if one is None else np.dtype(kind).type(one) for one in wanted]
    column = pa.array(numbers, getattr(pa, kind)())
    path = parquet(tmp_path, {"n": column, "list": pa.array([[one] for one in column])})
    assert [json_text(row) for row in all_of(load(path))] == [
        json_text({"n": one, "list": [one]}) for one in wanted
    ]


def test_nan_is_a_number_that_is_missing(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"q": ["a", "b"], "x": [math.nan, 1.0]})
    assert all_of(load(path)) == [{"q": "a", "x": None}, {"q": "b", "x": 1.0}]
    rows = load(path, columns={"q": "q", "x": "x"})
    assert rows.report.dropped == {"empty": (1, (0,))}


def test_items_of_a_list_have_only_the_keys_that_they_were_written_with(tmp_path: Path) -> None:
    """Arrow gives all tools the keys of each, and fills them with nulls."""
    tools = [
        {"name": "a", "parameters": {"x": {"type": "string", "enum": ["p", "q"]}}},
        {"name": "b", "parameters": {"y": {"type": "number"}}},
    ]
    parts = [{"hint": "h", "level": None}, {"hint": None, "level": 2}]
    path = parquet(tmp_path, {"q": ["a", "b"], "tools": [tools, None], "extra": parts})
    rows = all_of(load(path))
    assert rows == [
        {"q": "a", "tools": tools, "extra": parts[0]},
        {"q": "b", "tools": None, "extra": parts[1]},
    ]
    (row,) = all_of(load(path, columns={"tools": "tools"}))
    assert row == {"tools": tools}


def test_a_column_that_only_late_rows_have_is_a_column(write: Write) -> None:
    rows: list[dict[str, Any]] = [{"a": str(n)} for n in range(5000)] + [{"a": "z", "b.c": "!"}]
    found = load(write("rows.jsonl", lines(rows)), columns={"a": "a", "late": "b.c"})
    assert all_of(found) == [{"a": "z", "late": "!"}]


def held_out_of(path: str, fraction: float) -> tuple[list[Any], list[Any]]:
    spec = TasksSpec(dataset=path, held_out=fraction, duplicates="keep")
    train, held_out = (open_tasks(spec, split, 0) for split in ("train", "held_out"))
    return (
        [train[index]["q"] for index in range(len(train))],
        [held_out[index]["q"] for index in range(len(held_out))],
    )


def test_the_distinct_row_of_mostly_equal_rows_is_held_out(write: Write) -> None:
    path = write("rows.jsonl", lines([{"q": "a"}] * 9 + [{"q": "b"}]))
    assert held_out_of(path, 0.2) == (["a"] * 9, ["b"])


@_EXAMPLES
@given(
    questions=st.lists(st.sampled_from("abcd"), min_size=1, max_size=20),
    fraction=st.floats(0.001, 0.999),
)
def test_equal_rows_are_on_one_side_and_no_side_is_empty(
    fresh: Callable[[str, str], str], questions: list[str], fraction: float
) -> None:
    path = fresh("rows.jsonl", lines([{"q": one} for one in questions]))
    if len(set(questions)) == 1:
        with pytest.raises(DataError, match="different rows") as caught:
            held_out_of(path, fraction)
        assert (caught.value.kind, caught.value.field) == ("no_rows", "tasks.held_out")
        return
    train, held_out = held_out_of(path, fraction)
    assert train
    assert held_out
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(questions)


@pytest.mark.parametrize(
    "tasks",
    [
        {"dataset": "a.jsonl", "held_out": "a.jsonl"},
        {"dataset": "a.jsonl", "held_out": "./a.jsonl"},
        {"dataset": "data/*.jsonl", "held_out": "data/../data/*.jsonl"},
        {"dataset": "owner/name", "held_out": "train"},
        {"dataset": "owner/name", "split": "test", "held_out": "test"},
        {"mix": {"x": {"dataset": "a.jsonl"}, "y": {"dataset": "b.jsonl", "held_out": "a.jsonl"}}},
    ],
)
def test_training_rows_cannot_be_held_out(tasks: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"held_out: .* names the training rows"):
        JobTasksSpec.model_validate(tasks)


def test_a_held_out_file_cannot_be_a_training_file_under_another_name(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("data/a.jsonl", lines([{"q": "a"}, {"q": "b"}]))
    (tmp_path / "link.jsonl").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    write("copy.jsonl", Path(path).read_bytes())
    for dataset, held_out, why in (
        (path, "data/a.jsonl", "one of the files"),
        (path, "link.jsonl", "one of the files"),
        ("data/*.jsonl", path, "one of the files"),
        ("data/*.jsonl", "copy.jsonl", "copy.jsonl is a copy of data/a.jsonl"),
    ):
        spec = TasksSpec(dataset=dataset, held_out=held_out)
        with pytest.raises(DataError, match=why) as caught:
            open_tasks(spec, "held_out", 0)
        assert (caught.value.kind, caught.value.field) == ("split_overlap", "tasks.held_out")
    other = write("data/b.jsonl", lines([{"q": "c"}]))
    mix = {"a": {"dataset": path}, "b": {"dataset": other, "held_out": "link.jsonl"}}
    with pytest.raises(DataError, match="one of the files") as caught:
        open_tasks(JobTasksSpec.model_validate({"mix": mix}), "held_out", 0)
    assert caught.value.field == "tasks.mix.b.held_out"


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl.gz", "shuffled.jsonl", "some.jsonl"])
async def test_held_out_rows_cannot_all_be_training_rows_in_a_file_of_another_kind(
    write: Write, name: str
) -> None:
    rows = [{"q": str(n)} for n in range(9)]
    path = write("rows.jsonl", lines(rows))
    content = {
        "rows.json": json.dumps(rows).encode(),
        "rows.jsonl.gz": gzip.compress(lines(rows).encode()),
        "shuffled.jsonl": lines(rows[::-1]).encode(),
        "some.jsonl": lines(rows[3:5]).encode(),
    }[name]
    spec = TasksSpec(dataset=path, held_out=write(name, content))
    queries = QuerySource(spec)
    assert await queries.load("train") == 9
    with pytest.raises(DataError, match=r"are also rows of .*rows\.jsonl") as caught:
        await queries.load("held_out")
    assert (caught.value.kind, caught.value.field) == ("split_overlap", "tasks.held_out")


async def test_some_held_out_rows_that_are_training_rows_are_noted(write: Write) -> None:
    rows = [{"q": str(n)} for n in range(9)]
    spec = TasksSpec(
        dataset=write("a.jsonl", lines(rows)),
        held_out=write("b.jsonl", lines([*rows[:2], {"q": "x"}])),
    )
    queries = QuerySource(spec)
    await queries.load("train")
    assert await queries.load("held_out") == 3
    assert any("2 rows of " in note and "are also training rows" in note for note in queries.notes)


@pytest.mark.parametrize(
    ("split", "held_out", "shared"),
    [
        (None, "train[:10%]", 1),
        ("train[:90%]", "train[50%:]", 4),
        ("train+test", "test", 2),
        ("train[:90%]", "train[90%:]", 0),
        (None, "test", 0),
    ],
)
def test_held_out_rows_cannot_be_part_of_the_training_split(
    write: Write, tmp_path: Path, split: str | None, held_out: str, shared: int
) -> None:
    write("set/train.jsonl", lines([{"q": str(n)} for n in range(10)]))
    write("set/test.jsonl", lines([{"q": "x"}, {"q": "y"}]))
    spec = TasksSpec(dataset=str(tmp_path / "set"), split=split, held_out=held_out)
    if not shared:
        assert len(open_tasks(spec, "held_out", 0))
        return
    with pytest.raises(DataError, match=f"{shared} of its rows") as caught:
        open_tasks(spec, "held_out", 0)
    assert (caught.value.kind, caught.value.field) == ("split_overlap", "tasks.held_out")


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (pa.array([7]), pa.array(["007"]), "the type int64 in .*, but string in"),
        (pa.array(["x"]), pa.array([7]), "the type string in"),
        (pa.array(["x"]), pa.array([datetime.datetime(2024, 1, 5)]), "but timestamp"),
        (pa.array([True]), pa.array(["true"]), "the type bool in"),
        (pa.array([1]), pa.array([2.5]), "but double in"),
        (pa.array([0.1], pa.float32()), pa.array([0.1]), "the type float in"),
        (pa.array([[1]]), pa.array([[1.5]]), "but list"),
        (pa.array([{"x": 1}]), pa.array([{"x": "1"}]), "the type struct"),
        *[(pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),) * 2 + ("the type map",)],
    ],
)
def test_a_column_of_several_types_or_of_maps_is_refused_only_where_it_is_used(
    tmp_path: Path, first: Any, second: Any, why: str
) -> None:
    """Values would be converted to the type in the first file: "007" to 7."""
    for number, values in enumerate((first, second)):
        table = pa.table({"question": [f"q{number}"], "answer": values})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    spec = RowsSpec(dataset=f"{tmp_path}/*.parquet")
    with pytest.raises(DataError, match=f"'answer' .* has .*{why}") as refused:
        load_rows(spec, "tasks")
    assert (refused.value.kind, refused.value.field) == ("not_json", "tasks.columns.answer")
    own = RowsSpec(dataset=f"{tmp_path}/*.parquet", columns={"question": "question"})
    assert [row["question"] for row in load_rows(own, "tasks")] == ["q0", "q1"]
    # A column that nothing reads is left out, as one of timestamps is.
    for file in tmp_path.glob("*.parquet"):
        pq.write_table(pq.read_table(file).rename_columns(["question", "other"]), file)
    found = load_rows(spec, "tasks")
    assert list(found) == [{"question": "q0"}, {"question": "q1"}]
    assert found.report.left_out == ("other",)


def test_arrow_files_of_different_types_are_refused(tmp_path: Path) -> None:
    for number, values in enumerate((pa.array([7]), pa.array(["007"]))):
        table = pa.table({"answer": values})
        with pa.ipc.new_file(str(tmp_path / f"{number}.arrow"), table.schema) as file:
            file.write_table(table)
    assert list(load(str(tmp_path / "1.arrow"))) == [{"answer": "007"}]
    with pytest.raises(DataError, match=r"answer has the type int64 in .*, but string in"):
        load(f"{tmp_path}/*.arrow")


@pytest.mark.parametrize(
    ("first", "second", "values"),
    [
        (pa.array([1], pa.int32()), pa.array([2**40]), [1, 2**40]),
        (pa.array(["x"]), pa.array(["y"]).dictionary_encode(), ["x", "y"]),
        (pa.array(["x"], pa.large_string()), pa.array(["y"]), ["x", "y"]),
        (pa.array([None]), pa.array(["007"]), [None, "007"]),
        (pa.array([[{"a": 1}]]), pa.array([[{"b": "x"}]]), [[{"a": 1}], [{"b": "x"}]]),
    ],
)
def test_types_that_hold_the_same_values_may_differ_between_files(
    tmp_path: Path, first: Any, second: Any, values: list[Any]
) -> None:
    for number, column in enumerate((first, second)):
        table = pa.table({"question": [f"q{number}"], "answer": column})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    spec = RowsSpec(dataset=f"{tmp_path}/*.parquet")
    assert [row["answer"] for row in load_rows(spec, "tasks")] == values
    # A column may also be missing in some files.
    pq.write_table(pa.table({"question": ["q0"]}), tmp_path / "0.parquet")
    found = load_rows(spec, "tasks")
    assert [row["answer"] for row in found] == [None, values[1]]


def test_parts_of_translations_are_columns(tmp_path: Path) -> None:
    pairs = datasets.Dataset.from_dict(
        {"translation": [{"en": "one", "de": "eins"}]},
        features=datasets.Features({"translation": datasets.Translation(["en", "de"])}),
    )
    pairs.to_parquet(path := tmp_path / "rows.parquet")
    columns = {"question": "translation.en", "answer": "translation.de"}
    spec = RowsSpec(dataset=str(path), columns=columns)
    assert list(load_rows(spec, "tasks")) == [{"question": "one", "answer": "eins"}]


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_a_csv_may_be_separated_otherwise(write: Write, separator: str) -> None:
    """As spreadsheets write it where the comma is the decimal sign."""
    text = f"question{separator}answer\r\na{separator}1,50\r\n"
    assert list(load(write("a.csv", text))) == [{"question": "a", "answer": "1,50"}]


def test_columns_of_one_name_and_files_of_different_columns_are_refused(
    write: Write, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="the column 'answer' appears twice"):
        load(write("a.csv", "answer,answer\n1,2\n"))
    assert load(write("a.csv", ",,answer\n0,1,2\n"))[0]["answer"] == "2"
    write("b.csv", "answer;question\n1;2\n")
    with pytest.raises(
        DataError, match=r"different columns: .*answer; but .*b\.csv: answer;question"
    ):
        load(f"{tmp_path}/*.csv")


def test_tools_of_two_shapes_in_parquet_are_shown_without_nulls(tmp_path: Path) -> None:
    def tool(name: str, **properties: Any) -> dict[str, Any]:
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    def call(name: str, **arguments: Any) -> dict[str, Any]:
        return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}

    row = {
        "messages": [
            {"role": "user", "content": "3+4?"},
            {"role": "assistant", "content": "", "tool_calls": [call("add", a=3, b=4)]},
            {"role": "tool", "content": "7", "tool_call_id": "c"},
            {"role": "assistant", "content": "", "tool_calls": [call("show", text="7")]},
        ],
        "tools": [tool("add", a={"type": "number"}), tool("show", text={"enum": ["7", "8"]})],
    }
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    chat = make_chat(TOOLED)
    who = {"solver": Role("solver", "p", chat, Sampling(max_new_tokens=8))}
    found = demonstrations_of(load(str(path))[0], who)
    assert found == demonstrations_of(row, who)
    assert "null" not in chat.transcript(found[-1].prompt_ids + found[-1].response_ids)
