"""Decorated functions stay functions, and declare the data that jobs and deployments need."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import troupe
from tests.functions import declared
from troupe.functions import Declaration, DeclarationError, declaration_of
from troupe.functions.describing import IMPORT_SECONDS, DescribeError, describe, described

HERE = "tests.functions.declared"


def of(function: Any) -> Declaration:
    found = declaration_of(function)
    assert found is not None
    return found


def test_a_declared_function_is_called_as_before() -> None:
    turns = [{"response": "four"}]
    assert declared.exact({"data": {"answer": "four"}}, turns, rewards={}) == 1.0
    assert asyncio.run(declared.look_up("troupe", limit=1)) == ["troupe"]


def test_a_declaration_has_the_given_settings_only() -> None:
    bare, full = of(declared.exact), of(declared.look_up)
    assert (bare.kind, bare.name, bare.version, bare.costs) == ("reward", "exact", "1", {})
    assert (full.kind, full.name, full.version) == ("tool", "search", "2")
    assert full.costs == {"cores": 0, "timeout_seconds": 5, "quota": "search"}
    assert full.description == "Finds pages."
    assert declaration_of(declared.undeclared) is None


def test_the_schema_of_the_arguments_follows_from_the_hints() -> None:
    schema = of(declared.look_up).parameters
    assert schema["required"] == ["words"]
    assert schema["properties"]["limit"] == {"type": "integer", "default": 3}
    assert schema["properties"]["order"]["enum"] == ["new", "old"]
    assert schema["additionalProperties"] is False
    assert of(declared.edit).parameters["properties"]["files"]["type"] == "object"


@pytest.mark.parametrize(
    ("costs", "field"),
    [
        ({"cores": -1}, "cores"),
        ({"cores": True}, "cores"),
        ({"cores": 4, "max_cores": 2}, "max_cores"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds"),
        ({"parallel_fraction": 1.5}, "parallel_fraction"),
        ({"expected_seconds": -1}, "expected_seconds"),
        ({"expected_seconds": float("inf")}, "expected_seconds"),
        ({"expected_seconds": True}, "expected_seconds"),
        ({"seconds_per": 2.0}, "seconds_per"),
        ({"seconds_per": {"tests": float("nan")}}, "seconds_per.tests"),
        ({"seconds_per": {"tests[0]": 1.0}}, "seconds_per"),
        ({"sandbox": "jail"}, "sandbox"),
        ({"stateful": True}, "stateful"),
        ({"core": 2}, "core"),
        ({"name": "a/b"}, "name"),
        ({"version": ""}, "version"),
    ],
)
def test_costs_that_cannot_work_are_refused_by_name(costs: dict[str, Any], field: str) -> None:
    with pytest.raises(DeclarationError, match=field) as refused:
        troupe.reward(**costs)(declared.undeclared)
    assert (refused.value.field, refused.value.function) == (field, "undeclared")
    assert declaration_of(declared.undeclared) is None


def test_a_reward_that_returns_no_number_is_refused() -> None:
    def words(query: Any, turns: Any, rewards: Any) -> str: ...
    def verdict(query: Any, turns: Any, rewards: Any) -> dict[str, bool]: ...
    def nothing(query: Any, turns: Any, rewards: Any) -> None: ...
    def each(query: Any, turns: Any, rewards: Any) -> Mapping[str, float] | None: ...
    def untold(query, turns, rewards): ...  # type: ignore[no-untyped-def]

    for refused in (words, verdict, nothing):
        with pytest.raises(DeclarationError, match="is not a reward"):
            troupe.reward(refused)  # type: ignore[type-var]
    assert troupe.reward(each) is each
    assert troupe.reward(untold) is untold


def test_a_tool_whose_arguments_are_not_json_is_refused() -> None:
    def reads(data: bytes) -> str: ...
    def opens(at: dict[str, Path]) -> str: ...
    def by_place(word: str, /) -> str: ...

    for refused, field in ((reads, "data"), (opens, "at"), (by_place, "word")):
        with pytest.raises(DeclarationError, match=field):
            troupe.tool(refused)
    with pytest.raises(DeclarationError, match="cannot be called"):
        troupe.tool(3)  # type: ignore[type-var]


def test_a_module_is_described_by_an_interpreter_of_its_own() -> None:
    found = {one.name: one for one in described(HERE)}
    assert set(found) == {"exact", "search", "edit"}
    assert found["search"].entrypoint == f"{HERE}:look_up"
    assert found["search"].costs == of(declared.look_up).costs


def test_an_undeclared_function_can_be_described_by_name(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("def score(query, turns, rewards):\n    return 1.0\n")
    (one,) = described("alone:score", str(tmp_path))
    assert (one.kind, one.name, one.costs) == ("", "score", {})
    with pytest.raises(DescribeError, match="does not declare a function"):
        described("alone", str(tmp_path))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_module:score", "No module named 'no_such_module'"),
        (f"{HERE}:nothing", "nothing"),
        (f"{HERE}:not_a_function", "is a int, not a function"),
    ],
)
def test_a_failed_import_is_described_in_one_line(target: str, said: str) -> None:
    with pytest.raises(DescribeError, match=said) as refused:
        describe(target)
    assert "\n" not in str(refused.value)


def test_a_module_that_ends_its_interpreter_is_told_from_one_that_describes(
    tmp_path: Path,
) -> None:
    (tmp_path / "leaves.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "raises.py").write_text("raise SystemExit('no')\n")
    with pytest.raises(DescribeError, match="terminated the interpreter"):
        described("leaves", str(tmp_path))
    with pytest.raises(DescribeError, match="SystemExit: no"):
        described("raises", str(tmp_path))


@pytest.mark.parametrize(
    "start",
    ["os.fork()", "if os.fork() == 0:\n    time.sleep(90)\n    os._exit(0)"],
    ids=["that comes back", "that goes on"],
)
def test_a_process_that_a_module_forks_when_it_is_imported_has_no_part_in_the_answer(
    start: str, tmp_path: Path
) -> None:
    text = f"import os, time\n{start}\ndef score() -> float:\n    return 1.0\n"
    (tmp_path / "forking.py").write_text(text)
    began = time.monotonic()
    [found] = described("forking:score", str(tmp_path))
    assert found.name == "score"
    assert time.monotonic() - began < IMPORT_SECONDS


def test_a_module_that_writes_into_the_answer_is_refused(tmp_path: Path) -> None:
    writes = "for one in range(3, 64):\n    try:\n        os.write(one, b'x')\n"
    text = f"import os\n{writes}    except OSError:\n        pass\ndef score(): pass\n"
    (tmp_path / "writing.py").write_text(text)
    with pytest.raises(DescribeError, match="wrote into the file of its answer"):
        described("writing:score", str(tmp_path))
