"""One group per worker serves the assignment of cores and the limits of sandboxes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.reward.cgroups import (
    CGROUPS,
    ControlGroups,
    CoreManager,
    choose_backend,
    open_groups,
    write,
)
from tests.support.waiting import PATIENCE
from troupe.rpc import new_id

v1 = pytest.mark.skipif(
    os.geteuid() != 0 or not (CGROUPS / "cpu" / "cpu.cfs_quota_us").exists(),
    reason="no writable cgroup v1 here",
)


@pytest.fixture
def spinner() -> Iterator[psutil.Process]:
    """A process that only runs."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def groups() -> Iterator[ControlGroups]:
    found = open_groups(parent=f"troupe-test-{new_id()}")
    assert found is not None
    yield found
    found.close()


def _files(groups: ControlGroups, tree: str) -> Path:
    (group,) = (p for p in (CGROUPS / tree / groups._parent).iterdir() if p.is_dir())
    return group


def _members(groups: ControlGroups, name: str) -> list[int]:
    """Ids of the processes in the group of `name`."""
    path = groups._paths(groups._current[name][0])[0]
    return [int(pid) for pid in (path / "cgroup.procs").read_text().split()]


@v1
def test_cores_and_limits_of_one_worker_for_real(
    spinner: psutil.Process, groups: ControlGroups
) -> None:
    core = min(os.sched_getaffinity(0))
    manager = CoreManager({0: [core]}, choose_backend(groups, "cgroup1"))
    manager.adopt("w", [spinner.pid])
    groups.confine("w", [spinner.pid], 7, 10)
    assert _members(groups, "w") == [spinner.pid]
    cpu = _files(groups, "cpu")
    assert (_files(groups, "pids") / "pids.max").read_text().strip() == "7"
    limit = (_files(groups, "memory") / "memory.limit_in_bytes").read_text()
    assert int(limit) == (256 + 10) << 20
    lease = manager.take("w", 1)
    manager.grant(lease)
    assert spinner.cpu_affinity() == [core]
    assert (cpu / "cpu.cfs_quota_us").read_text().strip() == "100000"
    manager.give_back(lease)
    assert (cpu / "cpu.cfs_quota_us").read_text().strip() == "1000"
    # A call that takes no cores is not held to that quota: it stands behind the others only.
    waits = manager.take("w", 0)
    manager.grant(waits)
    assert (cpu / "cpu.cfs_quota_us").read_text().strip() == "-1"
    assert int((cpu / "cpu.shares").read_text()) < 100
    assert spinner.cpu_affinity() == sorted(os.sched_getaffinity(0))
    manager.give_back(waits)
    assert (cpu / "cpu.cfs_quota_us").read_text().strip() == "1000"


@v1
def test_a_frozen_process_uses_no_cpu_and_ends_when_forgotten(
    spinner: psutil.Process, groups: ControlGroups
) -> None:
    groups.adopt("w", [spinner.pid])
    groups.freeze("w")
    before = sum(spinner.cpu_times()[:2])
    spinner.kill()  # v1 keeps it until it thaws
    assert spinner.is_running()
    assert sum(spinner.cpu_times()[:2]) == before
    groups.forget("w")
    assert spinner.wait(PATIENCE) is not None
    groups.close()
    assert not list(CGROUPS.glob(f"*/{groups._parent}"))


@v1
def test_processes_that_a_killed_service_left_frozen_are_ended(spinner: psutil.Process) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()  # an unused id
    left = ControlGroups(CGROUPS, f"troupe-test-{(stem := new_id())}-{child.pid}.0")
    left.adopt("w", [spinner.pid])
    left.freeze("w")
    mine = ControlGroups(CGROUPS, f"troupe-test-{stem}-{os.getpid()}.0")
    try:
        assert spinner.wait(PATIENCE) is not None
    finally:
        left.close()
        mine.close()


@pytest.mark.skipif(
    os.geteuid() != 0 or not (CGROUPS / "unified/cgroup.controllers").exists(),
    reason="no cgroup v2 here, or not ours",
)
def test_cgroup2_freezes_for_real(spinner: psutil.Process) -> None:
    """Where v1 has the other controllers, v2 still has its groups and their freezer."""
    groups = ControlGroups(CGROUPS / "unified", f"troupe-test-{new_id()}")
    try:
        groups.adopt("w", [spinner.pid])
        groups.freeze("w")
        assert groups.frozen("w")
        assert _members(groups, "w") == [spinner.pid]
        groups.thaw("w")
        assert not groups.frozen("w")
        groups.adopt("w", [spinner.pid])  # again: the same group
        assert _members(groups, "w") == [spinner.pid]
    finally:
        spinner.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            spinner.wait(PATIENCE)
        groups.close()


FILES = ("cgroup.procs", "cpuset.cpus", "cpu.max", "cpu.weight", "memory.max", "pids.max")


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    """The machines that test this have no v2 tree with these controllers: one of plain files."""
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("")
    group = tmp_path / "troupe" / "w.0"
    group.mkdir(parents=True)
    (tmp_path / "troupe" / "cgroup.subtree_control").write_text("")
    for name in (*FILES, "cgroup.freeze", "memory.swap.max"):
        (group / name).write_text("")
    (group / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    return tmp_path


def test_cgroup2_has_one_group_for_everything(unified: Path) -> None:
    groups = open_groups(unified, "troupe")
    assert groups is not None
    assert groups.controllers == {"cpu", "cpuset", "memory", "pids", "freezer"}
    manager = CoreManager({0: [3, 4]}, choose_backend(groups))
    assert manager.kind == "cgroup2"

    def written(*names: str) -> list[str]:
        return [(unified / "troupe" / "w.0" / name).read_text().strip() for name in names]

    manager.adopt("w", [42])
    groups.confine("w", [42], 16, 128)
    assert written(*FILES) == ["42", "", "max 100000", "2", str(384 << 20), "16"]
    lease = manager.take("w", 2)
    manager.grant(lease)
    assert written("cpuset.cpus", "cpu.max", "cpu.weight") == ["3,4", "200000 100000", "100"]
    manager.give_back(lease)
    assert written("cpu.max") == ["1000 100000"]
    manager.grant(manager.take("w", 0))
    assert written("cpuset.cpus", "cpu.max", "cpu.weight") == ["", "max 100000", "2"]
    groups.freeze("w")
    assert written("cgroup.freeze") == ["1"]
    groups.thaw("w")
    assert written("cgroup.freeze") == ["0"]


def test_two_calls_of_one_sandbox_have_the_cores_of_both(unified: Path) -> None:
    manager = CoreManager({0: [3, 4]}, choose_backend(open_groups(unified, "troupe")))
    manager.adopt("w", [42])
    first, second = manager.take("w", 1), manager.take("w", 1)
    manager.grant(first)
    manager.grant(second)
    assert (unified / "troupe/w.0/cpuset.cpus").read_text() == "3,4"
    manager.give_back(first)
    assert (unified / "troupe/w.0/cpuset.cpus").read_text() == "4"
    manager.give_back(second)
    assert (unified / "troupe/w.0/cpu.max").read_text() == "1000 100000"


def test_without_its_controllers_cores_go_by_affinity(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("io memory\n")
    (tmp_path / "cgroup.subtree_control").write_text("")
    (tmp_path / "troupe").mkdir()
    (tmp_path / "troupe" / "cgroup.subtree_control").write_text("")
    groups = open_groups(tmp_path, "troupe")
    assert groups is not None
    assert groups.controllers == {"memory", "freezer"}
    with pytest.raises(OSError, match="no controller cpu, cpuset"):
        choose_backend(groups, "cgroup2")
    assert choose_backend(groups).name == "affinity"
    assert choose_backend(None).name == "affinity"
    with pytest.raises(OSError, match="no control groups"):
        choose_backend(None, "cgroup1")
    assert open_groups(tmp_path / "nothing", "troupe") is None


def test_a_control_file_is_never_created(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "cpu.max", "1")
