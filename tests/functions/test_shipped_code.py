"""Code that jobs ship: several versions of one package in a process."""

from __future__ import annotations

import asyncio
import sys
import threading
from hashlib import sha256
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE
from troupe.functions.shipped import ShippedCode, current, open_shipped, opened, using
from troupe.workflow import EntrypointError, load_attribute, load_tasks, load_workflow
from troupe.workflow.loading import forget_edited

FLOW = """
from __future__ import annotations
import dataclasses
import json, shipped_team.deep.rule as rule
import shipped_team.deep
from shipped_team import VERSION
from . import words
from .deep.rule import *

@dataclasses.dataclass
class State:
    value: int = 0

async def play(query, agents, tools):
    from shipped_team.late import late
    import shipped_helper
    return {"version": VERSION, "late": late(), "helper": shipped_helper.NUMBER}

def names():
    return [VERSION, rule.RULE, shipped_team.deep.rule.RULE, words.WORD, RULE, json.dumps(1)]

class Tasks:
    def __init__(self, split):
        import shipped_team.late as late
        self.items = [{"n": late.late(), "split": split}]
    def __len__(self):
        return 1
    def __getitem__(self, index):
        from shipped_team import VERSION
        return {**self.items[index], "version": VERSION}
"""


def write(folder: Path, version: int) -> Path:
    files = {
        "shipped_team/__init__.py": f"VERSION = {version}",
        "shipped_team/flow.py": FLOW,
        "shipped_team/words.py": f"WORD = 'word {version}'",
        "shipped_team/deep/rule.py": f"RULE = 'rule {version}'",
        "shipped_team/late.py": f"def late():\n    return {version}",
        "shipped_helper.py": f"NUMBER = {version}",
        "shipped_notes/readme.txt": "no module",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def versions(tmp_path: Path) -> list[ShippedCode]:
    folders = [write(tmp_path / str(number), number) for number in (1, 2)]
    return [open_shipped(sha256(str(one).encode()).hexdigest(), one) for one in folders]


def test_each_job_sees_its_own_version(versions: list[ShippedCode]) -> None:
    loaded = []
    for code in versions:
        with using(code):
            loaded.append(
                (
                    load_workflow("shipped_team.flow:play"),
                    load_attribute("shipped_team.flow:names", "x"),
                    load_tasks("shipped_team.flow:Tasks", "train", {})[0],
                )
            )
    assert current() is None
    for number, (play, names, tasks) in enumerate(loaded, start=1):
        # Also imports at run time, when no job is current any more.
        ran = asyncio.run(play(None, None, None))  # type: ignore[arg-type]
        assert ran == {"version": number, "late": number, "helper": number}
        assert names() == [
            number,
            *(f"rule {number}",) * 2,
            f"word {number}",
            f"rule {number}",
            "1",
        ]
        assert tasks[0] == {"n": number, "split": "train", "version": number}
    assert not {name for name in sys.modules if name.startswith(("shipped_team", "shipped_helper"))}


def test_threads_import_their_own(versions: list[ShippedCode]) -> None:
    found: dict[int, set[int]] = {1: set(), 2: set()}
    begin = threading.Barrier(8)

    def load(number: int) -> None:
        begin.wait()
        with using(versions[number - 1]):
            play = load_workflow("shipped_team.flow:play")
        for _ in range(20):
            found[number] |= set(asyncio.run(play(None, None, None)).values())  # type: ignore[arg-type]

    threads = [threading.Thread(target=load, args=(1 + i % 2,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == {1: {1}, 2: {2}}


def test_modules_that_are_not_shipped_come_from_the_installation(
    versions: list[ShippedCode],
) -> None:
    with using(versions[0]):
        assert load_attribute("json:dumps", "x") is __import__("json").dumps
        with pytest.raises(EntrypointError, match="nothing' does not exist") as error:
            load_attribute("shipped_team.nothing:x", "workflow")
        assert "code.include" in (error.value.remedy or "")
        # A folder without modules is none.
        with pytest.raises(EntrypointError, match="does not exist"):
            load_attribute("shipped_notes:x", "workflow")
    with pytest.raises(EntrypointError, match="does not exist"):
        load_attribute("shipped_team.flow:play", "workflow")


def test_an_edit_of_a_file_does_not_unload_shipped_modules(versions: list[ShippedCode]) -> None:
    with using(versions[0]):
        load_attribute("shipped_team.flow:play", "x")
    (versions[0].folder / "shipped_helper.py").write_text("NUMBER = 9")
    assert not [name for name in forget_edited() if name.startswith("troupe_code_")]
    assert opened("0" * 64) is None
