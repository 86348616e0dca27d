"""Files of another user of the machine in world-writable places, under names that Troupe will use.
A real other user plants it: a child process that is not root."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from services.chassis.app import _set_compile_cache
from tests.support.waiting import PATIENCE
from troupe.client.cli.slurm import write_files
from troupe.cluster import ClusterSettings, EmbeddedCluster
from troupe.cluster.errors import CommonDirectory, NotPrivate, TransferDirNotWritable
from troupe.cluster.settings import default_transfer_dir
from troupe.cluster.state import close_to_others
from troupe.disks import (
    Scratch,
    own_directory,
    private_directory,
    replace_file,
    replaceable_part,
    strangers_part,
)
from troupe.rpc.errors import InvalidArgument, TroupeError
from troupe.transfer import Transfer

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def as_nobody(*command: object) -> None:
    words = [str(word) for word in command]
    subprocess.run(words, check=True, user=NOBODY, group=NOBODY, extra_groups=[], timeout=PATIENCE)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory where every user may write, as /tmp is."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o1777)
        yield place


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory of the other user on another file system than the temporary files."""
    place = Path(tempfile.mkdtemp(prefix="test-", dir="/dev/shm"))
    try:
        if place.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
            pytest.skip("/dev/shm is no file system of its own here")
        os.chown(place, NOBODY, NOBODY)
        yield place
    finally:
        shutil.rmtree(place)


def mode(path: str | Path) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def contents(directory: Path) -> list[Path]:
    return list(directory.rglob("*"))


def direct_link(shared: Path, target: Path) -> Path:
    as_nobody("ln", "-s", target, shared / "planted")
    return shared / "planted"


def link_on_the_way(shared: Path, target: Path) -> Path:
    return direct_link(shared, target) / "below"


def own_link_to_another_link(shared: Path, target: Path) -> Path:
    direct_link(shared, target)
    (shared / "mine").mkdir(mode=0o755)
    (shared / "mine" / "link").symlink_to("../planted")
    return shared / "mine" / "link"


def dangling_link(shared: Path, target: Path) -> Path:
    return direct_link(shared, target / "later")


def directory(shared: Path, target: Path) -> Path:
    as_nobody("mkdir", shared / "planted")
    return shared / "planted"


def directory_on_the_way(shared: Path, target: Path) -> Path:
    return directory(shared, target) / "below" / "deeper"


def root_directory_behind_a_link(shared: Path, target: Path) -> Path:
    """The other user chooses which directory of root is closed to everybody else."""
    os.chown(target, 0, 0)
    target.chmod(0o755)
    return direct_link(shared, target)


PLANTED = [
    direct_link,
    link_on_the_way,
    own_link_to_another_link,
    dangling_link,
    directory,
    directory_on_the_way,
    root_directory_behind_a_link,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_directory_that_another_user_planted_is_refused_for_every_use(
    plant: Callable[[Path, Path], Path], shared: Path, elsewhere: Path
) -> None:
    path = plant(shared, elsewhere)
    before = mode(elsewhere)
    with pytest.raises(PermissionError, match="uid 65534"):
        own_directory(path)
    with pytest.raises(InvalidArgument, match="belongs to another user"):
        Transfer(path)
    with pytest.raises(InvalidArgument, match="belongs to another user"):
        Transfer(shared / "own", fallback=path)
    with pytest.raises(NotPrivate, match="uid 65534"):
        close_to_others(path)
    with pytest.raises(InvalidArgument, match="belongs to another user"):
        write_files(path, "script", "{}")
    assert contents(elsewhere) == []
    assert mode(elsewhere) == before


def test_a_link_at_the_default_transfer_directory_gets_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TROUPE_TRANSFER_DIR", raising=False)
    target = Path(tempfile.mkdtemp())
    os.chown(target, NOBODY, NOBODY)
    planted = default_transfer_dir(tmp_path / "runs")
    as_nobody("ln", "-s", target, planted)
    try:
        cluster = EmbeddedCluster(ClusterSettings(data_dir=tmp_path / "runs", panel=False))
        with pytest.raises(TransferDirNotWritable, match="uid 65534"):
            asyncio.run(cluster.start())
        assert contents(target) == []
        assert planted.is_symlink(), "what is not ours is not removed"
    finally:
        planted.unlink()
        target.rmdir()


def test_a_directory_for_jobs_that_another_user_planted_is_refused(
    shared: Path, elsewhere: Path, tmp_path: Path
) -> None:
    planted = direct_link(shared, elsewhere)
    given = ClusterSettings(data_dir=tmp_path / "runs", jobs_dir=planted / "jobs", panel=False)
    with pytest.raises(NotPrivate, match="--jobs-dir") as caught:
        asyncio.run(EmbeddedCluster(given).start())
    assert caught.value.field == "jobs_dir"
    assert contents(elsewhere) == []


def test_a_refused_directory_of_another_user_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TROUPE_TRANSFER_DIR", raising=False)
    planted = default_transfer_dir(tmp_path / "runs")
    as_nobody("mkdir", planted)
    as_nobody("touch", planted / "theirs")
    cluster = EmbeddedCluster(ClusterSettings(data_dir=tmp_path / "runs", panel=False))
    try:
        with pytest.raises(TransferDirNotWritable):
            asyncio.run(cluster.start())
        assert (planted / "theirs").exists()
    finally:
        shutil.rmtree(planted)


def test_an_entry_that_another_user_left_in_an_open_data_directory_is_refused(
    shared: Path, elsewhere: Path
) -> None:
    data_dir = shared / "runs"
    data_dir.mkdir()
    data_dir.chmod(0o777)
    as_nobody("ln", "-s", elsewhere, data_dir / "transfer")
    with pytest.raises(NotPrivate, match="'transfer' in it belongs to another user"):
        close_to_others(data_dir)


def test_links_and_directories_of_ones_own_are_used(shared: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (shared / "link").symlink_to(real)
    assert own_directory(shared / "link" / "below") == shared / "link" / "below"
    assert (real / "below").is_dir()
    assert own_directory(shared / "a" / "b") == shared / "a" / "b"
    assert mode(shared / "a") & 0o022 == 0
    close_to_others(shared / "link" / "runs")
    assert strangers_part(shared / "nothing" / "there" / "yet") is None
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(OSError, match="symbolic links"):
        strangers_part(tmp_path / "circle")


@pytest.mark.parametrize(("owner", "accepted"), [(0, True), (NOBODY, False)])
def test_a_mount_is_used_only_if_it_belongs_to_this_user_or_root(
    shared: Path, owner: int, accepted: bool
) -> None:
    place = shared / "mounted"
    place.mkdir()
    options = f"size=1m,mode=0777,uid={owner}"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        if accepted:
            assert own_directory(place) == place
        else:
            with pytest.raises(PermissionError, match="uid 65534"):
                own_directory(place)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory in which a group of users may write, with a directory of one of them."""
    place = tmp_path / "project"
    place.mkdir()
    place.chmod(0o2775)
    (place / "theirs").mkdir()
    os.chown(place / "theirs", NOBODY, NOBODY)
    (place / "link").symlink_to(place / "theirs")
    os.chown(place / "link", NOBODY, NOBODY, follow_symlinks=False)
    return place


@pytest.mark.parametrize("name", ["theirs", "link"])
def test_a_directory_of_another_user_gets_no_weights_wherever_it_lies(
    project: Path, name: str
) -> None:
    with pytest.raises(PermissionError, match="belongs to another user"):
        own_directory(project / name)
    with pytest.raises(InvalidArgument, match="belongs to another user"):
        Transfer(project / name)
    assert own_directory(project / "ours") == project / "ours"


@pytest.mark.parametrize("name", ["open", "link"])
def test_a_directory_that_is_open_to_others_gets_no_weights(tmp_path: Path, name: str) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(PermissionError, match=r"other users may write to it \(mode 777\)"):
        own_directory(tmp_path / name)


def test_a_place_without_sticky_bit_is_named(shared: Path, tmp_path: Path) -> None:
    assert replaceable_part(shared / "a" / "runs") is None
    shared.chmod(0o777)
    (tmp_path / "link").symlink_to(shared / "a")
    for path in (shared / "a" / "runs", tmp_path / "link" / "runs"):
        assert replaceable_part(path) == shared
    assert replaceable_part(shared) is None


def test_a_cluster_says_where_other_users_can_replace_its_directories(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    theirs = shared / "theirs"
    as_nobody("mkdir", theirs)
    shared.chmod(0o777)
    monkeypatch.chdir(theirs)
    settings = ClusterSettings(
        data_dir=shared / "runs", redis_url="redis://127.0.0.1:1/0", panel=False
    )
    with pytest.raises(TroupeError):  # there is no Redis
        asyncio.run(EmbeddedCluster(settings, told.append).start())
    assert any("belongs to another user (uid 65534)" in text for text in told), told
    assert any(f"chmod +t {shared}" in text for text in told), told


def test_compiled_code_is_kept_where_no_other_user_planted_any(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    as_nobody("mkdir", shared / f"troupe-compiled-{os.getuid()}")
    _set_compile_cache()
    kept = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert (kept.parent, kept.stat().st_uid, mode(kept)) == (shared, os.getuid(), 0o700)
    (shared / f"troupe-compiled-{os.getuid()}").rmdir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    for _ in range(2):  # it is found again
        _set_compile_cache()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{shared}/troupe-compiled-{os.getuid()}"


@pytest.mark.parametrize("path", ["/tmp", "/dev/shm", "/var/tmp", "/", "/tmp/../tmp/."])
def test_a_directory_that_all_users_share_is_used_for_nothing(path: str) -> None:
    before = {one: mode(one) for one in ("/tmp", "/dev/shm", "/var/tmp", "/")}
    with pytest.raises(CommonDirectory, match="shared by all users"):
        close_to_others(Path(path))
    with pytest.raises(InvalidArgument, match="name a directory in it"):
        Transfer(Path(path))
    assert {one: mode(one) for one in before} == before


def test_a_mount_of_root_is_used_by_another_user(shared: Path) -> None:
    """As in a pod, whose volumes belong to root."""
    assert strangers_part(shared) is None
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            made = private_directory(shared / "theirs")
            os._exit(0 if strangers_part(made) is None else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert strangers_part(shared / "theirs") == (shared / "theirs", NOBODY)


def test_a_file_is_replaced_and_no_link_in_its_place_is_followed(
    shared: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    as_nobody("ln", "-s", precious, shared / "port")
    as_nobody("ln", "-s", precious, shared / "port.tmp")
    as_nobody("ln", "-s", precious, shared / f".port.{os.getpid()}")
    replace_file(shared / "port", "80\n")
    assert precious.read_text() == "kept"
    assert (shared / "port").read_text() == "80\n"
    assert not (shared / "port").is_symlink()


def test_a_swept_directory_is_this_users_own(shared: Path, elsewhere: Path) -> None:
    (elsewhere / "kept").touch()
    as_nobody("ln", "-s", elsewhere, shared / "troupe-x-1")
    as_nobody("mkdir", shared / "troupe-x-2")
    with Scratch("troupe-x-", shared) as path:
        assert mode(path) == 0o700
    assert (elsewhere / "kept").exists()
    assert (shared / "troupe-x-2").is_dir()


def test_a_token_that_another_user_knows_is_not_used_by_a_slurm_job(shared: Path) -> None:
    directory = shared / "runs"
    write_files(directory, "script", "{}")
    kept = (directory / "token").read_text()
    write_files(directory, "script", "{}")
    assert (directory / "token").read_text() == kept
    (directory / "token").chmod(0o644)
    with pytest.raises(InvalidArgument, match="only you can read"):
        write_files(directory, "script", "{}")
    (directory / "token").unlink()
    (directory / "token").symlink_to(shared / "known")
    with pytest.raises(InvalidArgument, match="only you can read"):
        write_files(directory, "script", "{}")
