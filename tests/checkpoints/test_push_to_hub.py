"""`troupe export --push-to-hub` against a hub on this host."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from tests.support.fake_hub import TOKEN, FakeHub, fake_hub
from tests.support.waiting import PATIENCE
from troupe.checkpoints import hub as uploads
from troupe.checkpoints.hub import HubRepository
from troupe.checkpoints.verifying import Lineage, digests
from troupe.client.cli.app import main
from troupe.rpc import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    TroupeError,
    Unauthenticated,
    Unavailable,
)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    # Its protocol for large files has a server of its own; without it they go by git-lfs.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with fake_hub() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The data directory of a cluster that has stopped, with one checkpoint."""
    folder = tmp_path / "runs/mine/checkpoints/solver/v3"
    folder.mkdir(parents=True)
    for at in range(3):
        name = f"model-{at + 1:05d}-of-00003.safetensors"
        save_file({f"t{at}": torch.full((300,), float(at))}, folder / name)
    (folder / "config.json").write_text("{}")
    Lineage("mine", "it", "solver", 3, 2, "c" * 32, "", files=digests(folder)).write(folder)
    return tmp_path / "runs"


def push(runs: Path, to: Path, *options: str, repository: str = "me/model") -> int:
    arguments = ["export", "mine", str(to), "--data-dir", str(runs), *options]
    return main([*arguments, "--push-to-hub", repository])


def test_an_export_is_uploaded_as_it_is(
    hub: FakeHub, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "out"
    assert push(runs, to) == 0
    assert hub.repositories["me/model"] == {one.name: one.read_bytes() for one in to.iterdir()}
    assert "README.md" in hub.repositories["me/model"]
    assert hub.private == {"me/model": True}
    assert hub.messages == ["it: solver @ 3"]
    assert f"uploaded to {hub.url}/me/model/commit/1" in capsys.readouterr().out
    # Again, to a repository that is there, by the name of the newest version.
    assert push(runs, tmp_path / "again") == 0


def test_an_upload_goes_on_where_it_was(
    hub: FakeHub, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "out"
    hub.refuse_after = 1
    assert push(runs, to) == 1
    err = capsys.readouterr().err
    assert "cannot be used: Error while uploading 'model-" in err
    assert "files that the hub has are not sent again" in err
    assert not hub.repositories["me/model"]
    hub.refuse_after = None
    before = {one.name: one.stat().st_mtime_ns for one in to.iterdir()}
    assert push(runs, to) == 0
    assert {one.name: one.stat().st_mtime_ns for one in to.iterdir()} == before
    assert len(hub.uploads) == len(set(hub.uploads)) == 3
    assert len(hub.repositories["me/model"]) == len(before)


def test_an_older_export_is_not_uploaded_in_place_of_the_newest(
    hub: FakeHub, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "out"
    assert push(runs, to) == 0
    folder = runs / "mine/checkpoints/solver"
    shutil.copytree(folder / "v3", folder / "v5")
    Lineage("mine", "it", "solver", 5, 4, "d" * 32, "", files=digests(folder / "v3")).write(
        folder / "v5"
    )
    assert push(runs, to) == 1
    assert "is not empty" in capsys.readouterr().err
    assert push(runs, tmp_path / "newest") == 0
    assert push(runs, to, "--version", "3") == 0  # which is asked for
    shutil.rmtree(folder)
    assert push(runs, to) == 0  # the only one that is left
    assert hub.messages == [f"it: solver @ {version}" for version in (3, 5, 3, 3)]


def test_a_directory_with_another_export_is_refused(
    hub: FakeHub, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "out"
    assert push(runs, to) == 0
    file = to / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    assert push(runs, to) == 1
    assert "differs from the written file" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    (other / "a").write_text("of somebody else")
    assert push(runs, other) == 1
    assert "is not empty" in capsys.readouterr().err
    assert [one.name for one in other.iterdir()] == ["a"]


def test_an_upload_goes_on_for_the_same_options_only(
    hub: FakeHub, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "mine/job.yaml").write_text(
        "policies: {solver: {}, checker: {}}\n"
        "agents: {writer: {policy: solver}, critic: {policy: checker}}\n"
    )
    to = tmp_path / "out"
    assert push(runs, to, "--policy", "writer") == 0
    for same in ("writer", "solver"):
        assert push(runs, to, "--policy", same) == 0
    capsys.readouterr()
    for other in (("--policy", "checker"), ("--policy", "critic"), ("--version", "2")):
        assert push(runs, to, *other) != 0
        assert "uploaded" not in capsys.readouterr().out
    # An export of an adapter is not the merged model that is asked for now.
    (to / "adapter_config.json").write_text("{}")
    assert push(runs, to, "--merged") == 1
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "error", "kind"),
    [
        ("no token", Unauthenticated, "hub_token_missing"),
        ("wrong token", Unauthenticated, "hub_token_refused"),
        ("foreign", FailedPrecondition, "hub_not_writable"),
        ("bad name", InvalidArgument, "hub_name_invalid"),
        ("away", Unavailable, "hub_unreachable"),
        ("silent", DeadlineExceeded, "hub_silent"),
    ],
)
def test_a_hub_that_cannot_be_written_to_is_known_before_anything_is_copied(
    hub: FakeHub,
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    error: type[TroupeError],
    kind: str,
) -> None:
    name = {"foreign": "somebody/model", "bad name": "a/b/c"}.get(change, "me/model")
    if change == "no token":
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    elif change == "wrong token":
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    elif change == "away":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    elif change == "silent":
        monkeypatch.setattr(uploads, "_ANSWER_SECONDS", 0.3)
        hub.silent.set()
    with pytest.raises(error) as caught:
        HubRepository(name)
    assert caught.value.kind == kind
    assert caught.value.remedy
    assert push(runs, tmp_path / "out", name) != 0
    assert not (tmp_path / "out").exists()


def test_a_hub_that_falls_silent_in_an_upload_is_given_up(
    hub: FakeHub, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = HubRepository("me/model")
    monkeypatch.setattr(uploads, "_UPLOAD_SECONDS", 0.3)
    hub.silent.set()
    with pytest.raises(DeadlineExceeded, match="to take 4"):
        repository.upload(runs / "mine/checkpoints/solver/v3", "it")
    # The abandoned upload ends once the hub answers.
    hub.silent.clear()
    for thread in threading.enumerate():
        if thread.name == "hub":
            thread.join(PATIENCE)
    assert len(hub.repositories["me/model"]) == 5


def test_the_streamed_upload_of_the_library(
    hub: FakeHub, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library hf_xet sends large files itself; the test has only small ones."""
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert HubRepository("me/small").upload(folder, "it") == f"{hub.url}/me/small/commit/1"
    assert hub.repositories["me/small"] == {"config.json": b"{}"}
