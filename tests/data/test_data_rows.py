"""Rows of data sets: kept rows, dropped rows and their report, and the order of queries."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.trajectories.queries import QuerySource
from tests.support.cluster import job_yaml
from tests.workflow.stage import make_chat
from troupe.data.rows import DataRows, content_of, load_rows
from troupe.data.tables import DataError
from troupe.data.tasks import TaskMix, TaskSplit, open_tasks
from troupe.functions.library.answers import solves_puzzle
from troupe.job import RowsSpec, TasksSpec, parse_job
from troupe.job.sections.data import JobTasksSpec
from troupe.workflow.errors import EntrypointError
from troupe.workflow.languages import Language, token_counter

ROWS = [
    {"problem": "1 + 1", "extra": {"answer": "2"}},
    {"problem": "", "extra": {"answer": "0"}},
    {"problem": "2 + 2", "extra": {"answer": "4"}},
    {"problem": "3 + 3", "extra": {"answer": None}},
    {"problem": "1 + 1", "extra": {"answer": "2"}},
    {"problem": "1 + 1 + 1 + 1", "extra": {"answer": "4"}},
    {"problem": "5 + 5", "extra": {"answer": "10"}},
]
COLUMNS = {"question": "problem", "answer": "extra.answer"}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as JSON lines; returns the file's path."""

    def write(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def all_of(rows: DataRows) -> list[dict[str, Any]]:
    return [rows[index] for index in range(len(rows))]


def test_dropped_rows_are_counted_with_reasons(lines: Callable[..., str]) -> None:
    spec = RowsSpec(dataset=lines(ROWS), columns=COLUMNS, max_characters={"question": 9})
    rows = load_rows(spec, "tasks")
    assert all_of(rows) == [
        {"question": "1 + 1", "answer": "2"},
        {"question": "2 + 2", "answer": "4"},
        {"question": "5 + 5", "answer": "10"},
    ]
    assert rows.report.dropped == {
        "empty": (2, (1, 3)),
        "with more than 9 characters of question": (1, (5,)),
        "duplicates": (1, (4,)),
    }
    assert str(rows.report) == (
        f"{spec.dataset}: 3 of 7 rows, dropped: 2 empty (rows 1, 3); 1 with more than 9 characters "
        "of question (row 5); 1 duplicates (row 4)"
    )


def test_without_columns_rows_are_as_they_are(lines: Callable[..., str]) -> None:
    rows = load_rows(RowsSpec(dataset=lines(ROWS), duplicates="keep"), "tasks")
    assert all_of(rows) == ROWS
    assert not rows.report.dropped


def test_tokens_are_counted_by_whom_one_gives(lines: Callable[..., str]) -> None:
    spec = RowsSpec(dataset=lines(ROWS), columns=COLUMNS, max_tokens={"question": 3})
    rows = load_rows(spec, "tasks", count_tokens=lambda texts: [len(t.split()) for t in texts])
    assert rows.report.dropped["with more than 3 tokens of question"] == (1, (5,))


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, lines: Callable[..., str]) -> None:
    plain = [{"question": f"{i}?", "answer": str(i)} for i in range(40)]
    lines(plain)
    pq.write_table(pa.Table.from_pylist(plain), tmp_path / "rows.parquet")
    for name, separator in (("rows.csv", ","), ("rows.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["question", "answer"], delimiter=separator)
            writer.writeheader()
            writer.writerows(plain)
    for name in ("rows.jsonl", "rows.parquet", "rows.csv", "rows.tsv"):
        rows = load_rows(RowsSpec(dataset=str(tmp_path / name)), "tasks")
        assert [{k: str(v) for k, v in row.items()} for row in all_of(rows)] == plain, name


def test_a_folder_has_splits_and_a_pattern_several_files(
    tmp_path: Path, lines: Callable[..., str]
) -> None:
    (tmp_path / "set").mkdir()
    lines([{"a": "1"}], "set/train.jsonl")
    lines([{"a": "2"}], "set/test.jsonl")
    spec = TasksSpec(dataset=str(tmp_path / "set"), held_out="test")
    assert open_tasks(spec, "train", 0)[0] == {"a": "1"}
    assert open_tasks(spec, "held_out", 0)[0] == {"a": "2"}
    both = load_rows(RowsSpec(dataset=str(tmp_path / "set" / "*.jsonl")), "tasks")
    assert sorted(row["a"] for row in all_of(both)) == ["1", "2"]


@pytest.mark.parametrize(
    ("change", "field", "kind", "said"),
    [
        ({"dataset": "./nowhere.jsonl"}, "tasks.dataset", "dataset_missing", "no such file"),
        ({"dataset": "./nowhere"}, "tasks.dataset", "dataset_missing", "no such file"),
        ({"columns": {"q": "no"}}, "tasks.columns.q", "column_missing", "There are: problem"),
        ({"columns": {"q": "extra.no"}}, "tasks.columns.q", "column_missing", "are: answer"),
        (
            {"max_characters": {"no": 3}},
            "tasks.max_characters.no",
            "column_missing",
            "not a column",
        ),
        (
            {"columns": {"q": "problem"}, "max_characters": {"q": 1}},
            *("tasks.dataset", "no_rows", "no rows are left"),
        ),
    ],
)
def test_an_unreadable_data_set_names_the_field(
    lines: Callable[..., str], change: dict[str, Any], field: str, kind: str, said: str
) -> None:
    spec = RowsSpec.model_validate({"dataset": lines(ROWS), **change})
    with pytest.raises(DataError, match=said) as caught:
        load_rows(spec, "tasks")
    assert (caught.value.field, caught.value.kind) == (field, kind)
    assert caught.value.remedy


def test_a_broken_file_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(DataError, match="cannot be read") as caught:
        load_rows(RowsSpec(dataset=str(tmp_path / "broken.parquet")), "tasks")
    assert (caught.value.field, caught.value.kind) == ("tasks.dataset", "dataset_unreadable")


def test_a_missing_split_is_named(tmp_path: Path, lines: Callable[..., str]) -> None:
    (tmp_path / "set").mkdir()
    lines([{"a": "1"}], "set/train.jsonl")
    with pytest.raises(DataError) as caught:
        open_tasks(TasksSpec(dataset=str(tmp_path / "set"), held_out="dev"), "held_out", 0)
    assert (caught.value.field, caught.value.kind) == ("tasks.held_out", "split_missing")
    assert caught.value.value == "dev"


def test_without_the_hub_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError) as caught:
        load_rows(RowsSpec(dataset="nobody/nothing-of-the-kind", config="main"), "tasks")
    assert (caught.value.field, caught.value.kind) == ("tasks.dataset", "hub_unreachable")
    assert "HF_TOKEN" in str(caught.value)


def test_messages_count_by_their_contents() -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert content_of(messages) == "ab\nc"
    assert content_of(None) == ""


@pytest.fixture
def many(lines: Callable[..., str]) -> str:
    return lines([{"question": f"{i}?"} for i in range(100)])


def test_held_out_rows_are_none_of_the_training_rows_whatever_the_seed_and_the_order(
    many: str, lines: Callable[..., str]
) -> None:
    def questions(path: str, split: str, seed: int) -> list[str]:
        tasks = open_tasks(TasksSpec(dataset=path, held_out=0.2), split, seed)
        return [tasks[tasks.position(index)]["question"] for index in range(len(tasks))]

    held_out, train = questions(many, "held_out", 0), questions(many, "train", 0)
    assert len(held_out) == 20
    assert sorted(held_out + train) == sorted(f"{i}?" for i in range(100))
    assert questions(many, "held_out", 7) == held_out
    assert questions(many, "train", 7) != train
    assert sorted(questions(many, "train", 7)) == sorted(train)
    other_way = lines([{"question": f"{i}?"} for i in reversed(range(100))], "reversed.jsonl")
    assert sorted(questions(other_way, "held_out", 0)) == sorted(held_out)


@given(
    length=st.integers(1, 40),
    passes=st.integers(1, 3),
    seed=st.integers(0, 2**63 - 1),
    first=st.integers(0, 100),
)
def test_every_pass_takes_every_item_once_and_a_resumed_one_goes_on(
    length: int, passes: int, seed: int, first: int
) -> None:
    items: Any = [{"n": n} for n in range(length)]

    def split() -> TaskSplit:
        return TaskSplit(items, length, "items", f"{seed}/train")

    whole = [split().position(index) for index in range(passes * length)]
    for turn in range(passes):
        assert sorted(whole[turn * length : (turn + 1) * length]) == list(range(length))
    resumed = split()
    assert [resumed.position(i) for i in range(first, len(whole))] == whole[first:]


def test_the_order_is_the_same_in_every_release() -> None:
    tasks = TaskSplit([{}] * 8, 8, "items", "0/train")
    assert [tasks.position(index) for index in range(16)] == ORDER


# The draws of this release; a resumed job of an earlier one must draw the same.
ORDER = [5, 6, 4, 1, 2, 0, 7, 3, 4, 2, 3, 1, 0, 7, 6, 5]


async def test_a_resumed_job_gets_the_rows_that_it_would_have_got(many: str) -> None:
    spec = TasksSpec(dataset=many, held_out=0.1)
    first, second = QuerySource(spec, 3), QuerySource(spec, 3)
    rows = [await first.get("train", index) for index in range(120)]
    assert [await second.get("train", index) for index in range(60, 120)] == rows[60:]
    assert first.notes == [f"{many}: 100 of 100 rows; 90 of them are for training"]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_first_of_equal_rows_is_kept(tmp_path_factory: Any, numbers: list[int]) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in numbers))
    rows = load_rows(RowsSpec(dataset=str(path)), "tasks")
    assert [row["n"] for row in all_of(rows)] == list(dict.fromkeys(numbers))
    assert len(np.unique(rows.digests)) == len(rows)


def test_puzzles_without_reasoning_gym_are_refused_with_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    spec = TasksSpec(source="troupe.data.reasoning_gym:PuzzleTasks", args={"sets": {}})
    with pytest.raises(
        EntrypointError, match=r'pip install "troupe-rl\[reasoning-gym\]"'
    ) as caught:
        open_tasks(spec, "train", 0)
    assert caught.value.field == "tasks.source"
    turns = [{"agent": "a", "response": "1", "tokens": 1}]
    with pytest.raises(ImportError, match=r"troupe-rl\[reasoning-gym\]"):
        solves_puzzle({"data": {}}, turns, {})


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    first=st.integers(0, 2500),
)
def test_a_mixture_keeps_its_proportions_and_its_sources_their_passes(
    lengths: list[int], weights: list[float], first: int
) -> None:
    def mix() -> TaskMix:
        parts = [
            TaskSplit([{"of": at, "n": n} for n in range(length)], length, str(at), f"s{at}")
            for at, length in enumerate(lengths)
        ]
        return TaskMix(parts, weights[: len(lengths)], "0/train/mix")

    tasks = mix()
    asked: list[Any] = [tasks[tasks.position(index)] for index in range(3000)]
    total = sum(weights[: len(lengths)])
    for at, length in enumerate(lengths):
        own = [item["n"] for item in asked if item["of"] == at]
        share = weights[at] / total
        assert abs(len(own) / 3000 - share) <= len(lengths) / 1000
        for start in range(0, len(own) - length + 1, length):
            assert sorted(own[start : start + length]) == list(range(length))
    resumed = mix()
    assert [resumed[resumed.position(index)] for index in range(first, 3000)] == asked[first:]


def test_items_of_a_curriculum_are_those_of_the_first_pass() -> None:
    """Each item of each source has one number, in the order in which it is asked first."""
    parts = [
        TaskSplit([{"of": at, "n": n} for n in range(5)], 5, str(at), f"s{at}") for at in range(3)
    ]
    mix = TaskMix(parts, [1, 5, 2], "0/train/mix")
    assert (list(mix.sources), list(parts[0].sources)) == ([5, 5, 5], [5])
    for source, part in enumerate(parts):
        own = [mix[mix.position_in(source, item)] for item in range(5)]
        assert sorted((one["of"], one["n"]) for one in own) == [(source, n) for n in range(5)]
        assert own == [part[part.position(index)] for index in range(5)]
        assert own == [part[part.position_in(0, item)] for item in range(5)]


def test_a_mixture_holds_out_all_that_its_sources_hold_out(many: str) -> None:
    pytest.importorskip("reasoning_gym")
    puzzles = {"source": "troupe.data.reasoning_gym:PuzzleTasks"}
    puzzles |= {"args": {"sets": {"leg_counting": {}}, "size": 10}, "weight": 3}
    mix = {"rows": {"dataset": many, "held_out": 0.1}, "puzzles": puzzles}
    spec = JobTasksSpec.model_validate({"mix": mix})
    assert JobTasksSpec.model_validate_json(spec.model_dump_json()) == spec
    held_out, train = open_tasks(spec, "held_out", 0), open_tasks(spec, "train", 0)
    assert len(held_out) == 10 + 10
    assert len({held_out.position(index) for index in range(20)}) == 20
    asked = [train[train.position(index)] for index in range(100)]
    assert 60 < sum("entry" in item for item in asked) < 90
    assert train.notes == [f"{many}: 100 of 100 rows; 90 of them are for training"]


@pytest.mark.parametrize(
    "tasks",
    [
        {"dataset": "a.csv", "mix": {"x": {"dataset": "b.csv"}}},
        {"mix": {}},
        {"mix": {"x": {"weight": 2}}},
        {"mix": {"x": {"dataset": "b.csv"}}, "max_tokens": {"q": 3}},
    ],
)
def test_a_mixture_with_invalid_sources_or_fields_is_refused(tasks: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"exactly one|`max_tokens` needs a `dataset`"):
        JobTasksSpec.model_validate(tasks)


def test_half_a_surrogate_pair_is_counted_as_a_token(lines: Callable[..., str]) -> None:
    """JSON may hold one, and tokenizers refuse it."""
    spec = parse_job(job_yaml())
    count = token_counter(spec, {name: Language(make_chat(), ()) for name in spec.policies})
    path = lines([{"q": "ab\ud83d"}, {"q": "abcdef"}])
    rows = load_rows(RowsSpec(dataset=path, max_tokens={"q": 3}), "tasks", count_tokens=count)
    assert [rows[index]["q"] for index in range(len(rows))] == ["ab\ud83d"]
