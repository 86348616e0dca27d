"""Entrypoints: every wrong one is named with its field and a remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from troupe.workflow import EntrypointError, load_tasks, load_workflow, loading

HERE = __name__
ROOT = Path(__file__).resolve().parents[2]


async def good(query: Any, agents: Any, tools: Any) -> None:
    return None


async def two_arguments(query: Any, agents: Any) -> None:
    return None


def not_async(query: Any, agents: Any, tools: Any) -> None:
    return None


class AsyncObject:
    async def __call__(self, query: Any, agents: Any, tools: Any) -> None:
        return None


async_object = AsyncObject()


def three(split: str, size: int = 3) -> list[dict[str, int]]:
    return [{"n": i} for i in range(size)]


def test_functions_and_objects_are_workflows() -> None:
    # By name: an edit of a test during the run makes its module be read again.
    assert load_workflow(f"{HERE}:good").__name__ == "good"
    assert type(load_workflow(f"{HERE}:async_object")).__name__ == "AsyncObject"


@pytest.mark.parametrize(
    ("entrypoint", "message"),
    [
        ("no_such_module_anywhere:f", "does not exist here"),
        ("asyncio", "names nothing to import"),
        (":f", "names nothing to import"),
        (f"{HERE}:absent", "no attribute 'absent'"),
        (f"{HERE}:not_async", "must be an async function"),
        (f"{HERE}:AsyncObject", "must be an async function"),
        (f"{HERE}:two_arguments", "takes three arguments"),
    ],
)
def test_a_bad_workflow_names_field_value_and_remedy(entrypoint: str, message: str) -> None:
    with pytest.raises(EntrypointError, match=message) as caught:
        load_workflow(entrypoint)
    assert caught.value.field == "workflow"
    assert caught.value.value == entrypoint
    assert caught.value.remedy


def test_an_import_that_raises_is_told_from_one_that_is_missing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_workflow_module.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EntrypointError, match="No module named 'no_such_dependency'"):
        load_workflow("broken_workflow_module:f")


def test_tasks_are_made_with_split_and_args() -> None:
    tasks, length = load_tasks(f"{HERE}:three", "train", {"size": 5})
    assert len(tasks) == length == 5


@pytest.mark.parametrize(
    ("args", "message"), [({"sise": 1}, "unexpected keyword"), ({"size": 0}, "has 0 queries")]
)
def test_bad_tasks_are_named(args: dict[str, int], message: str) -> None:
    with pytest.raises(EntrypointError, match=message) as caught:
        load_tasks(f"{HERE}:three", "train", args)
    assert caught.value.field == "tasks.source"


EDITING = """
import asyncio, pathlib
from troupe.workflow import load_workflow

first = load_workflow("edited_workflow:play")
assert load_workflow("edited_workflow:play") is first
pathlib.Path("edited_helper.py").write_text("ANSWER = 42\\n")
second = load_workflow("edited_workflow:play")
# A job that runs with the old one goes on with it.
print(asyncio.run(first(0, 0, 0)), asyncio.run(second(0, 0, 0)))
"""


LAZILY_IMPORTED = """
import asyncio, pathlib
from troupe.workflow import load_workflow

pathlib.Path("edited_helper.py").write_text("ANSWER = 1\\n")
pathlib.Path("edited_workflow.py").write_text(
    "async def play(query, agents, tools):\\n    from edited_helper import ANSWER\\n"
    "    return ANSWER\\n"
)
first = asyncio.run(load_workflow("edited_workflow:play")(0, 0, 0))
pathlib.Path("edited_helper.py").write_text("ANSWER = 42\\n")
print(first, asyncio.run(load_workflow("edited_workflow:play")(0, 0, 0)))
"""

# Two jobs are prepared at once, in threads; the file of the second one was edited.
ANOTHER_IMPORTS = """
import os, pathlib, threading
from troupe.workflow import load_workflow

begun, go_on = threading.Event(), threading.Event()
pathlib.Path("pack").mkdir()
pathlib.Path("pack/__init__.py").touch()
pathlib.Path("pack/slow.py").write_text(
    "import __main__\\n__main__.begun.set()\\n__main__.go_on.wait(30)\\n"
    "async def play(query, agents, tools): ...\\n"
)
pathlib.Path("edited_workflow.py").write_text("async def play(query, agents, tools): ...\\n")
first = load_workflow("edited_workflow:play")
loaded = []
thread = threading.Thread(target=lambda: loaded.append(load_workflow("pack.slow:play")))
thread.start()
begun.wait(30)
os.utime("edited_workflow.py", (5, 5))
second = load_workflow("edited_workflow:play")
go_on.set()
thread.join()
# What was being imported may have read an older file: it is read anew, too.
print(second is not first, len(loaded), load_workflow("pack.slow:play") is not loaded[0])
"""


@pytest.mark.parametrize(
    ("program", "printed"),
    [(EDITING, "1 42\n"), (LAZILY_IMPORTED, "1 42\n"), (ANOTHER_IMPORTS, "True 1 True\n")],
)
def test_an_edited_module_is_read_anew_with_those_that_import_it(
    tmp_path: Path, program: str, printed: str
) -> None:
    (tmp_path / "edited_helper.py").write_text("ANSWER = 1\n")
    (tmp_path / "edited_workflow.py").write_text(
        "from edited_helper import ANSWER\nasync def play(query, agents, tools): return ANSWER\n"
    )
    # In a separate process: this one's modules are the other tests'.
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == (printed, "")


def test_directories_are_listed_anew_while_another_thread_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An import adds to the table of directories while it is read."""
    errors: list[Exception] = [RuntimeError("dictionary changed size"), KeyError("gone")]

    class Table(dict[str, Any]):
        def items(self) -> Any:
            if errors:
                raise errors.pop()
            return super().items()

    monkeypatch.setattr(sys, "path_importer_cache", Table(sys.path_importer_cache))
    loading.forget_edited()
    assert not errors
