"""The files that a job ships, and refusals."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from troupe.functions.sources import MAX_BYTES, SourceStore, collect, digest
from troupe.rpc import DataLoss, InvalidArgument
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import reward_pb2 as reward_pb


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name in (
        *("team/__init__.py", "team/flow.py", "team/data/big.csv", "team/__pycache__/flow.pyc"),
        *("team/.secret", "helper.py", "conf/a.yaml", "conf/b.txt", "notes.md"),
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}")
    return root


def names(root: Path, include: list[str], exclude: tuple[str, ...] = ()) -> list[str]:
    return [file.path for file in collect(root, include, exclude)]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (["team"], (), ["team/__init__.py", "team/data/big.csv", "team/flow.py"]),
        (["team"], ("team/data",), ["team/__init__.py", "team/flow.py"]),
        (["team"], ("*.csv",), ["team/__init__.py", "team/flow.py"]),
        (["helper.py", "conf/*.yaml"], (), ["conf/a.yaml", "helper.py"]),
        (["team/flow.py", "team"], ("*.csv",), ["team/__init__.py", "team/flow.py"]),
        (
            [".", "team/.secret"],
            ("*.md", "conf", "team/data"),
            ["helper.py", "team/.secret", "team/__init__.py", "team/flow.py"],
        ),
    ],
)
def test_include_and_exclude_choose_the_shipped_files(
    project: Path, include: list[str], exclude: tuple[str, ...], expected: list[str]
) -> None:
    assert names(project, include, exclude) == expected


def test_the_hash_is_of_names_and_contents_alone(project: Path) -> None:
    first = digest(collect(project, ["team", "helper.py"]))
    os.utime(project / "helper.py", (1, 1))
    assert digest(collect(project, ["helper.py", "team"])) == first
    (project / "helper.py").write_text("other")
    assert digest(collect(project, ["team", "helper.py"])) != first


def test_links(project: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text("")
    (project / "team/inside.py").symlink_to("../helper.py")
    found = {file.path: file.content for file in collect(project, ["team"])}
    assert found["team/inside.py"] == b"# helper.py"
    (project / "team/out.py").symlink_to(tmp_path / "outside.py")
    with pytest.raises(InvalidArgument, match="leads out") as error:
        collect(project, ["team"])
    assert (error.value.field, error.value.value) == ("code.include", "team/out.py")
    assert "team/out.py" not in names(project, ["team"], ("team/out.py",))
    (project / "conf/up").symlink_to(project)
    with pytest.raises(InvalidArgument, match="link to a folder"):
        collect(project, ["conf"])


def test_a_link_that_leads_nowhere_is_refused_by_name(project: Path) -> None:
    link = project / "team/link.py"
    for target in ("gone.py", "link.py", "../team/link.py/x"):
        link.symlink_to(target)
        for include in (["team"], ["."], ["team/*"]):
            with pytest.raises(InvalidArgument) as error:
                collect(project, include)
            assert error.value.field == "code.include"
            assert "link.py" in str(error.value)
        assert "team/link.py" not in names(project, ["team"], ("team/link.py",))
        link.unlink()
    root = project / "root"
    root.symlink_to("root")
    with pytest.raises(InvalidArgument, match="not a folder"):
        collect(root, ["team"])
    with pytest.raises(InvalidArgument, match="not a folder"):
        collect(Path("~nobody-by-that-name"), ["team"])


def test_a_name_that_leads_up_and_down_again_is_refused(project: Path) -> None:
    """A service would refuse the names of its files."""
    for name in (f"../{project.name}/team", f"team/../../{project.name}/helper.py"):
        with pytest.raises(InvalidArgument, match="leads through") as error:
            collect(project, [name])
        assert error.value.field == "code.include"


@pytest.mark.parametrize("name", ["**x/a.py", "x" * 5000, "team/" + "y" * 300, "a\ud800"])
def test_a_name_that_no_file_can_have_is_refused(project: Path, name: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        collect(project, [name])
    assert error.value.field == "code.include"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_file_or_folder_that_cannot_be_read_is_refused_by_name() -> None:
    with tempfile.TemporaryDirectory() as name:  # the other user may not enter `tmp_path`
        root = Path(name)
        root.chmod(0o755)
        (root / "closed").mkdir(mode=0)
        (root / "closed.py").touch(mode=0)
        child = os.fork()
        if child == 0:
            found = []
            try:
                os.setuid(65534)
                for include in ("closed.py", "closed"):
                    try:
                        collect(root, [include])
                    except InvalidArgument as error:
                        found.append("cannot be read: Permission denied" in str(error))
            finally:
                os._exit(0 if found == [True, True] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_sources_that_cannot_be_shipped_are_refused(project: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="not a folder") as error:
        collect(tmp_path / "none", ["team"])
    assert error.value.field == "code.root"
    with pytest.raises(InvalidArgument, match="no such file"):
        collect(project, ["team", "tema"])
    with pytest.raises(InvalidArgument, match="names no file"):
        collect(project, ["conf"], ("conf/*",))
    (project / "troupe").mkdir()
    (project / "troupe/__init__.py").write_text("")
    with pytest.raises(InvalidArgument, match="Troupe's own"):
        collect(project, ["."])
    with (project / "team/model.bin").open("wb") as file:
        file.truncate(MAX_BYTES)
    with pytest.raises(InvalidArgument, match=r"the largest are team/model.bin \(16,777,216 bytes"):
        collect(project, ["team"])


class _Orchestrator:
    """Answers `ReadCode` with files of another hash, after the first time."""

    def __init__(self, files: list[reward_pb.SourceFile]) -> None:
        self.files, self.calls = files, 0

    async def ReadCode(
        self, request: orchestrator_pb.ReadCodeRequest, timeout: float
    ) -> orchestrator_pb.ReadCodeResponse:
        self.calls += 1
        return orchestrator_pb.ReadCodeResponse(files=self.files)


async def test_files_are_read_once_and_verified(project: Path, tmp_path: Path) -> None:
    files = collect(project, ["team"])
    orchestrator = _Orchestrator(files)
    store = SourceStore(tmp_path / "kept")
    for _ in range(2):
        folder = await store.fetch(digest(files), orchestrator)  # type: ignore[arg-type]
    assert orchestrator.calls == 1
    assert (folder / "team/flow.py").read_text() == "# team/flow.py"
    with pytest.raises(DataLoss) as error:
        await store.fetch("0" * 64, orchestrator)  # type: ignore[arg-type]
    assert error.value.field == "code.sha256"
    files.append(reward_pb.SourceFile(path="../out.py"))
    orchestrator.files = files
    with pytest.raises(InvalidArgument, match="leads out"):
        await store.fetch(digest(files), orchestrator)  # type: ignore[arg-type]
    assert not (tmp_path / "out.py").exists()
