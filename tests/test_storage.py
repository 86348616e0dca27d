"""Folders and files at paths and URLs: complete or absent, whatever fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from troupe.rpc.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from troupe.storage import place_at

KINDS = ("path", "file://", "memory://")


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty folder of each kind of file system."""
    if request.param == "path":
        yield str(tmp_path)
    elif request.param == "file://":
        yield f"file://{tmp_path}"
    else:
        yield f"memory://{tmp_path.name}"
        MemoryFileSystem.store.clear()


def files_below(root: str) -> dict[str, bytes]:
    """Content of each file by its path, as fsspec reads it."""
    system, base = fsspec.core.url_to_fs(root)
    system.invalidate_cache()
    return {
        found.removeprefix(base).lstrip("/"): system.cat_file(found) for found in system.find(base)
    }


def fill(folder: Path) -> None:
    """Files in a folder and in one below it."""
    (folder / "deep").mkdir()
    (folder / "deep" / "a.bin").write_bytes(bytes(range(256)))
    (folder / "zz.json").write_text("{}")
    (folder / "end").write_text("whole")


def test_a_folder_appears_with_all_of_its_files(root: str) -> None:
    with place_at(f"{root}/made/here").new_folder() as draft:
        fill(draft)
        assert files_below(f"{root}/made/here") == {}
    assert files_below(root) == {
        "made/here/deep/a.bin": bytes(range(256)),
        "made/here/zz.json": b"{}",
        "made/here/end": b"whole",
    }
    assert not draft.exists()


def test_a_file_appears_when_it_is_whole(root: str) -> None:
    with place_at(f"{root}/rows.jsonl").new_file() as draft:
        assert draft.suffix == ".jsonl"
        draft.write_text("{}\n")
        assert files_below(f"{root}/rows.jsonl") == {}
    assert files_below(root) == {"rows.jsonl": b"{}\n"}
    assert not draft.exists()


@pytest.mark.parametrize("kind", ["new_folder", "new_file"])
def test_an_error_while_it_is_written_leaves_nothing(root: str, kind: str) -> None:
    drafts: list[Path] = []

    def write() -> None:
        with getattr(place_at(f"{root}/out"), kind)() as draft:
            drafts.append(draft)
            (draft if kind == "new_file" else draft / "part").write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert files_below(root) == {}
    assert not drafts[0].exists()


@pytest.mark.parametrize("kind", ["new_folder", "new_file"])
def test_a_place_that_is_taken_is_refused_and_kept(root: str, kind: str) -> None:
    with place_at(f"{root}/out").new_folder() as draft:
        fill(draft)
    before = files_below(root)
    with (
        pytest.raises(FailedPrecondition, match="exists") as caught,
        getattr(place_at(f"{root}/out", "DIR"), kind)(),
    ):
        pytest.fail("it was opened")
    assert (caught.value.kind, caught.value.field) == ("target_not_vacant", "DIR")
    assert caught.value.value == f"{root}/out"
    assert files_below(root) == before


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with place_at(tmp_path / "out").new_folder() as draft:
        fill(draft)
    assert (tmp_path / "out" / "end").read_text() == "whole"
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def test_a_full_disk_is_named_and_nothing_is_left(root: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ResourceExhausted, match=r"the disk of .* is full") as caught,
        place_at(f"{root}/out").new_folder(),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert (caught.value.kind, caught.value.value) == ("storage_full", f"{root}/out")
    assert files_below(root) == {}


class FailingStore(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store that refuses the file `zz.json`, and keeps the order in which others came."""

    protocol = "failing"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    order: list[str] = []  # noqa: RUF012
    refuses = True

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        """Raise the errors of an object store."""
        if self.refuses and rpath.endswith("zz.json"):
            raise ConnectionError("the store is away")
        self.order.append(rpath)
        super().put_file(lpath, rpath, **options)


@pytest.fixture
def failing() -> Iterator[type[FailingStore]]:
    """`FailingStore`, as `failing://`."""
    fsspec.register_implementation("failing", FailingStore, clobber=True)
    FailingStore.refuses = True
    FailingStore.order.clear()
    yield FailingStore
    FailingStore.store.clear()
    FailingStore.clear_instance_cache()


def test_an_upload_that_breaks_is_taken_back(failing: type[FailingStore]) -> None:
    with (
        pytest.raises(FailedPrecondition, match="the store is away") as caught,
        place_at("failing://bucket/out").new_folder() as draft,
    ):
        fill(draft)
    assert caught.value.kind == "target_not_writable"
    assert failing.order, "something had been uploaded"
    assert files_below("failing://bucket") == {}


def test_the_file_that_says_that_a_folder_is_whole_is_uploaded_last(
    failing: type[FailingStore],
) -> None:
    failing.refuses = False
    with place_at("failing://bucket/out").new_folder(last="end") as draft:
        fill(draft)
    assert [os.path.basename(one) for one in failing.order] == ["a.bin", "zz.json", "end"]


def test_an_unknown_scheme_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="is not a URL of a known file system") as caught:
        place_at("nosuch://bucket/out", "DIR")
    assert (caught.value.field, caught.value.value) == ("DIR", "nosuch://bucket/out")


def test_a_password_in_a_url_is_not_shown() -> None:
    assert place_at("memory://me:secret@host/out").name == "memory://host/out"
    with pytest.raises(InvalidArgument) as caught:
        place_at("nosuch://me:secret@host/out")
    assert "secret" not in str(caught.value)


def test_a_scheme_whose_package_is_missing_names_the_package() -> None:
    if find_spec("adlfs") is not None:
        pytest.skip("adlfs is installed")
    with pytest.raises(FailedPrecondition, match="adlfs") as caught:
        place_at("abfs://container/out")
    assert caught.value.kind == "file_system_missing"
