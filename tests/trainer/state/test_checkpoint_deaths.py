"""Checkpoints of processes that are killed at any point, and of several at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from services.trainer.learning.model import load_model, load_tokenizer
from services.trainer.state.checkpoint import _write_whole, checkpoint_path, save_checkpoint
from services.trainer.state.training_state import StateStore
from tests.support.training import make_spec
from tests.support.waiting import PATIENCE
from tests.trainer.learning.test_files import make_state
from tests.trainer.stage import fill_up
from troupe.checkpoints.retention import prune, remove, versions_in
from troupe.checkpoints.verifying import Lineage
from troupe.rpc import ResourceExhausted
from troupe.transfer import checksum_of

# Audit events of files that change or are opened.
_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def dies(work: Callable[[], object], below: Path, after: int) -> bool:
    """`work` in a process that is killed before its touch number `after` of files in `below`;
    whether it came so far."""
    child = os.fork()
    if not child:
        left = [after]

        def touched(event: str, arguments: tuple[Any, ...]) -> None:
            # A process that deletes a tree names its contents relative to the directory.
            named = event != "open" or str(arguments[0]).startswith(str(below))
            if event in _EVENTS and named:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(touched)
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


def hidden(directory: Path) -> list[str]:
    """Return the entries that are not versions."""
    return [path.name for path in directory.iterdir() if not path.name.startswith("v")]


def test_a_death_at_any_point_leaves_whole_checkpoints(tmp_path: Path, tokenizer: Path) -> None:
    policy = make_spec(tokenizer).policies["solver"]
    model, fast = load_model("solver", policy, 0), load_tokenizer("solver", policy)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    fast.save_pretrained(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_bytes()
    points = 0
    while True:
        root = tmp_path / str(points)

        def save(version: int, root: Path = root) -> Path:
            path = checkpoint_path(root, "job", "solver", version)
            about = Lineage("job", "it", "solver", version, version - 1, "", "")
            save_checkpoint(path, model, weights, fast, keep=2, lineage=about)
            return path

        directory = save(1).parent
        save(2)
        died = dies(lambda: save(3), root, points)
        # The last good one is there, and no half checkpoint has the name of one.
        there = versions_in(directory)
        assert there[-1][0] in (2, 3)
        for version, path in there:
            found = Lineage.read(path)
            assert found is not None, path
            assert found.version == version
            assert checksum_of(load_file(path / "model.safetensors")) == checksum_of(weights)
            assert (path / "tokenizer.json").read_bytes() == whole
        # The next one removes the remains.
        save(4)
        assert [version for version, _ in versions_in(directory)][-1] == 4
        assert len(versions_in(directory)) == 2
        assert hidden(directory) == []
        if not died:
            break
        points += 1
    assert points > 10, "the hook hears nothing"


def test_a_death_at_any_point_leaves_whole_states(tmp_path: Path) -> None:
    points = 0
    while True:
        root = tmp_path / str(points)
        store = StateStore(root, "job", "solver", sync=False)
        for version in (1, 2):
            store.save(make_state(version))

        def go_on(store: StateStore = store) -> None:
            store.save(make_state(3))
            store.prune(3, 1)

        died = dies(go_on, root, points)
        assert store.versions()[-1] in (2, 3)
        for version in store.versions():
            assert store.load(version).version == version
        store.save(make_state(4))
        store.prune(4, 1)
        assert store.versions() == [4]
        assert hidden(root / "job/state/solver") == []
        if not died:
            break
        points += 1
    assert points > 10, "the hook hears nothing"


def test_two_writers_of_one_base_leave_it_whole(tmp_path: Path) -> None:
    """Policies on two workers write their common base at the same time."""
    place = tmp_path / ".base" / "00ff"
    together = threading.Barrier(2)
    failed: list[BaseException] = []

    def fill(folder: Path) -> None:
        (folder / "weights").write_text("the same")
        together.wait(PATIENCE)

    def write() -> None:
        try:
            _write_whole(place, fill)
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(PATIENCE)
    assert failed == []
    assert [path.name for path in place.parent.iterdir()] == ["00ff"]
    assert (place / "weights").read_text() == "the same"


def test_leftovers_of_dead_writers_are_pruned_and_unfinished_writes_stay(tmp_path: Path) -> None:
    for name in ("v1", "v2", ".v1.ab.tmp", ".v2.cd.old", ".v3.ef.tmp"):
        (tmp_path / name / "part").mkdir(parents=True)
    prune(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".v3.ef.tmp", "v2"]


def test_a_disk_that_is_full_at_any_file_is_named(small_disk: Path, tokenizer: Path) -> None:
    """Weights, tokenizer and the rest are written by libraries that fail differently."""
    policy = make_spec(tokenizer).policies["solver"]
    model, fast = load_model("solver", policy, 0), load_tokenizer("solver", policy)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    told, at, outcomes = set(), set(), []
    for leave in range(0, 160_000, 4096):
        path = checkpoint_path(small_disk, "job", "solver", leave)
        ballast = fill_up(small_disk, leave)
        try:
            save_checkpoint(path, model, weights, fast, keep=1)
            outcomes.append("saved")
        except ResourceExhausted as error:
            told.add((error.kind, error.field))
            at.add(type(error.__cause__).__name__)
            outcomes.append("full")
        ballast.unlink()
        if outcomes[-1] == "full" and path.parent.exists():
            assert list(path.parent.iterdir()) == []
        remove(small_disk / "job")
    assert outcomes == sorted(outcomes), "with more room it goes as well"
    assert set(outcomes) == {"full", "saved"}
    assert told == {("storage_full", "data_dir")}
    assert at == {"OSError", "Exception"}, "each of them was met"
