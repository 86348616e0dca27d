"""A sandbox can change nothing on the host, and read none of a cluster's data."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.reward.sandboxes import landlock, mounts, profile
from services.reward.sandboxes.profile import SandboxProfile
from tests.support.needs import BUBBLEWRAP
from tests.support.waiting import PATIENCE
from troupe.cluster.redis import write_config
from troupe.rpc import FailedPrecondition

pytestmark = BUBBLEWRAP
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="who is not root cannot become another")

# The results of a program that tries to write all of the kernel's files.
LOOKS_AROUND = """
import json, os, sys
written, made, seen = [], [], 0
for top in ("/proc", "/sys", "/dev", "/sys/fs/cgroup"):
    for folder, folders, files in os.walk(top):
        if top == "/proc" and folder == "/proc":
            folders[:] = [name for name in folders if not name.isdigit()]  # its own processes
        if folder == "/dev":
            folders.remove("shm")  # its own
        for name in files:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                continue
            seen += 1
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                written.append(path)
            except OSError:
                pass
        try:
            os.close(os.open(os.path.join(folder, "troupe-test"), os.O_CREAT | os.O_WRONLY))
            made.append(folder)
        except OSError:
            pass
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
first, _, count = map(int, open("/proc/self/uid_map").read().split()[:3])
with open("/proc/mounts") as mounts:
    writable = [w[1] for w in map(str.split, mounts) if "rw" in w[3].split(",")]
print(json.dumps({
    "written": written, "made": made, "seen": seen, "mounts": writable,
    # In no namespace of users but the host's.
    "user": os.getuid() if (first, count) == (0, 2**32 - 1) else None,
    "powers": [status[name].strip() for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no_new_privileges": status["NoNewPrivs"].strip(), "groups": status["Groups"].strip(),
}))
"""
DEVICES = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")}
OWN = {*DEVICES, "/dev/pts/ptmx"}


def inside(program: str, *before: str) -> Any:
    """Return the JSON output of a Python program in a sandbox that is started with the prefix
    `before`."""
    command, environment = SandboxProfile("bubblewrap", 64, 16).wrap(["-c", program])
    command = command[: next(i for i, word in enumerate(command) if word.startswith("--nproc"))]
    done = subprocess.run(
        [*before, *command], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def everybodys_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the system's interpreter: this one may lie where only root gets."""
    if not Path("/usr/bin/python3").exists():
        pytest.skip("the system has no Python of its own")
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    for name in ("prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, "/usr")
    monkeypatch.setattr(sys, "path", [])


def check(found: dict[str, Any]) -> None:
    assert found["seen"] > 100
    assert set(found["written"]) <= OWN
    assert found["made"] == []
    assert set(found["mounts"]) <= {"/proc", "/tmp", "/dev/shm", "/dev/pts", *DEVICES}
    assert found["user"] != 0
    assert found["powers"] == ["0" * 16] * 4
    assert found["no_new_privileges"] == "1"
    assert found["groups"] == ""


def test_nothing_of_the_kernel_can_be_written() -> None:
    found = inside(LOOKS_AROUND)
    check(found)
    if os.geteuid() == 0:
        assert found["user"] >= 1_900_000_000
        assert inside(LOOKS_AROUND)["user"] != found["user"]


@ROOT
@pytest.mark.parametrize("user", [65534, 1_899_999_999])
@pytest.mark.usefixtures("everybodys_python")
def test_nor_where_the_service_is_somebody(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    who = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
    monkeypatch.setattr(profile, "filter_path", lambda: None)  # in a folder of root's
    if subprocess.run([*who, "unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make namespaces of users")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: user)
        command, _ = SandboxProfile("bubblewrap").wrap(["-c", ""])
        assert "setpriv" not in " ".join(command)
        found = inside(LOOKS_AROUND, *who)
    check(found)
    if profile._disables_users():
        tried = "import ctypes, json; print(json.dumps(ctypes.CDLL(None).unshare(0x10000000)))"
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: user)
            assert inside(tried, *who) == -1


@ROOT
@pytest.mark.usefixtures("everybodys_python")
def test_nor_where_root_may_not_make_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root of a container: somebody else makes them."""
    who = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    tried = [*who, "setpriv", "--reuid=65534", "unshare", "-Ur", "true"]
    if subprocess.run(tried, capture_output=True).returncode:
        pytest.skip("this machine lets nobody make namespaces of users")
    monkeypatch.setattr(profile, "_capabilities", lambda: profile._BECOME)
    command, _ = SandboxProfile("bubblewrap").wrap(["-c", ""])
    assert command.index("--reuid") < command.index("--unshare-user")
    check(inside(LOOKS_AROUND, *who))


@ROOT
def test_missing_rights_of_root_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    confined = SandboxProfile("bubblewrap")
    with monkeypatch.context() as patch:
        patch.setattr(profile, "_capabilities", lambda: 0)
        with pytest.raises(FailedPrecondition, match="cannot become another user"):
            confined.wrap([])
    bubblewrap = shutil.which("bwrap")
    assert bubblewrap is not None
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: bubblewrap if name == "bwrap" else None)
        with pytest.raises(FailedPrecondition, match="setpriv is not installed"):
            confined.wrap([])
    private = tmp_path / "site-packages"
    private.mkdir(mode=0o700)
    (private / "tasks.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(private)])
    with pytest.raises(FailedPrecondition, match=r"chmod -R o\+rX"):
        inside(LOOKS_AROUND)


def test_users_of_a_container_that_has_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_mapped", lambda number, file: number < 65536)
    assert profile._next_user() == 65534
    monkeypatch.setattr(profile, "_mapped", lambda number, file: False)
    assert profile._next_user() is None


SECRET = f"secret-{os.urandom(8).hex()}"
READS = """
import json, os, sys
found = []
try:
    tops = os.listdir("/")
except PermissionError:
    tops = ["tmp"]
for top in tops:
    if top not in ("proc", "dev", "usr"):
        for folder, folders, files in os.walk("/" + top):
            if os.path.exists(os.path.join(folder, "lib")):
                folders.clear()  # the interpreter's
            for name in files:
                path = os.path.join(folder, name)
                try:
                    with open(path, "rb") as file:
                        if sys.argv[1].encode() in file.read(1 << 16):
                            found.append(path)
                except OSError:
                    pass
said = []
for path in sys.argv[2:]:
    try:
        open(path, "rb").close()
        said.append(path)
    except OSError:
        pass
modules = []
for name in ("tasks", "package.inner", "spaces.inner"):
    try:
        __import__(name)
        modules.append(name)
    except ImportError:
        pass
print(json.dumps([found, said, modules]))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A typical project's folder: modules, a package, a namespace, and secrets."""
    tmp_path = tmp_path / "of"
    tmp_path.mkdir()
    project = tmp_path / "project"
    for folder in ("package", "spaces", "data", ".git"):
        (project / folder).mkdir(parents=True)
    (project / "package/__init__.py").touch()
    for module in ("tasks.py", "package/inner.py", "spaces/inner.py"):
        (project / module).touch()
    for secret in (".env", "job.yaml", "data/notes.txt", ".git/config"):
        (project / secret).write_text(SECRET)
    for folder in (*tmp_path.parents, tmp_path):
        if folder.owner() == Path.home().owner() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    return project


def fill(data: Path) -> list[Path]:
    """A data directory with a cluster's files."""
    data.mkdir(parents=True, exist_ok=True)
    config, _ = write_config(data, 1234)
    config.write_text(f"{config.read_text()}# {SECRET}\n")
    names = (".troupe/cluster.json", "redis/appendonlydir/appendonly.aof.1.incr.aof")
    names = (*names, "logs/orchestrator.log", "job/rows.jsonl", "functions/abc/package/code.py")
    for name in names:
        path = data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SECRET)
    return [path for path in data.rglob("*") if path.is_file()]


def placed_below(project: Path) -> Path:
    return project / "runs"


def placed_in_a_package(project: Path) -> Path:
    return project / "package/runs"


def placed_around(project: Path) -> Path:
    return project


def placed_beyond_a_link(project: Path) -> Path:
    (project / "package/elsewhere").mkdir()
    (project / "runs").symlink_to("package/elsewhere")
    return project / "runs"


def placed_as_installed(project: Path) -> Path:
    """In a folder that is visible as a whole."""
    installed = project / "site-packages"
    installed.mkdir()
    sys.path.append(str(installed))
    return installed / "runs"


@pytest.mark.parametrize(
    "placed",
    [
        *(placed_below, placed_in_a_package, placed_around, placed_beyond_a_link),
        placed_as_installed,
    ],
)
@pytest.mark.parametrize("modules", [0, 100])
def test_a_sandbox_sees_imports_of_the_project_and_no_files_of_the_cluster(
    project: Path,
    placed: Callable[[Path], Path],
    modules: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    data = placed(project)
    files = fill(data)
    for number in range(modules):  # enough files that the folder is visible as a whole
        (project / f"module_{number}.py").touch()
    monkeypatch.setenv("TROUPE_DATA_DIR", str(data))
    transfer = project / "transfer"
    transfer.mkdir()
    (transfer / "weights").write_text(SECRET)
    monkeypatch.setenv("TROUPE_TRANSFER_DIR", str(transfer))
    program = "import sys; sys.argv[1:] = " + repr([SECRET, *map(str, files)]) + READS
    found, said, imported = inside(program)
    assert found == []
    assert said == [] if data != project else set(said) <= _modules_of(project)
    spaces = [] if data == project else ["spaces.inner"]  # or is it the cluster's?
    assert imported == ["tasks", "package.inner", *spaces]


def _modules_of(project: Path) -> set[str]:
    return {str(path) for path in project.rglob("*.py")}


@pytest.mark.parametrize("relative", [True, False])
def test_the_default_data_directory_is_one(
    project: Path, relative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.delenv("TROUPE_DATA_DIR", raising=False)
    if relative:
        monkeypatch.setenv("TROUPE_DATA_DIR", "runs")
    assert str(project.resolve() / "runs") in mounts.kept()


def test_directories_that_cannot_be_hidden_are_not_mounted(project: Path) -> None:
    data = project / "package/runs"
    fill(data)
    found = mounts.without([str(project)], [str(data)])
    assert str(project / "tasks.py") in found
    assert str(project / "package/inner.py") in found
    assert not any(str(data).startswith(path) or path.startswith(str(data)) for path in found)
    named = [str(data / "models"), str(project)]
    assert str(data / "models") in mounts.without(named, [str(data)], declared=True)
    assert str(data) not in mounts.without(named, [str(data)], declared=True)


@pytest.mark.skipif(landlock.version() == 0, reason="the kernel has no landlock")
def test_a_process_that_declares_its_files_reads_nothing_of_a_cluster(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = project / "package/runs"
    files = fill(data)
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    monkeypatch.setenv("TROUPE_DATA_DIR", str(data))
    command, environment = SandboxProfile(reads=(str(project / "data"),)).launch()
    declared = command[-1].removeprefix("--landlock=")
    program = (
        "import json, sys; from services.reward.sandboxes import landlock; "
        "landlock.confine(*json.loads(sys.argv.pop(1)))\n" + READS
    )
    tried = (*files, project / ".env", project / "data/notes.txt")
    done = subprocess.run(
        [*(sys.executable, "-P", "-c", program, declared, SECRET), *map(str, tried)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    _, said, imported = json.loads(done.stdout)
    assert said == [str(project / "data/notes.txt")]
    assert imported == ["tasks", "package.inner", "spaces.inner"]
