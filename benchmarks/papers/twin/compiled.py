"""The twin as machine code: its own sources and the live router's, compiled by mypyc.

Copies of the packages `troupe` and `testbed` with the compiled modules next to their sources come
first on the path, so that the same files decide and there is no second router.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[3]
# Ignored by git.
CACHE: Final = _ROOT / "build" / "twin"
_PACKAGES: Final = ("troupe", "testbed")
# The modules that run for every turn, and the subclasses of their classes.
MODULES: Final = (
    "troupe/scheduling/routing.py",
    "troupe/twin/batch.py",
    "troupe/twin/workload.py",
    "troupe/twin/engines.py",
    "troupe/twin/job.py",
    "troupe/twin/cluster.py",
    "testbed/twin/actions.py",
    "testbed/twin/workload.py",
    "testbed/twin/cluster.py",
)
_OPTIONS: Final = ("--ignore-missing-imports", "--follow-imports=silent")
_BUILD_SECONDS: Final = 1800.0
# Prefix of builds that another process may be making.
_UNFINISHED: Final = "new-"


def is_compiled() -> bool:
    """Return whether this process runs the compiled modules."""
    found = importlib.util.find_spec("troupe.twin.cluster")
    return found is not None and not str(found.origin).endswith(".py")


def environment(cache: Path = CACHE) -> dict[str, str]:
    """Return the environment of a Python process, to be started with -P, that imports the compiled
    modules. Build them unless `cache` has a build of these sources, and remove builds of other
    sources.

    Raises SystemExit that names the missing requirement if they cannot be built.
    """
    built = cache / _key()
    if not built.is_dir():
        _build(built)
    before = os.environ.get("PYTHONPATH")
    paths = [str(built), str(_ROOT), *([before] if before else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run_compiled(module: str, arguments: Sequence[str]) -> None:
    """Replace this process by one that runs `module` compiled. Raises SystemExit."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    ready = environment()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, ready)


def _key() -> str:
    """Return a hash of the sources and their compiler. Other files of the package count too, since
    they declare types that the compiled modules use."""
    found = hashlib.sha256(f"{sys.version} {MODULES}".encode())
    if importlib.util.find_spec("mypyc") is not None:
        found.update(version("mypy").encode())
    for path in sorted(one for name in _PACKAGES for one in (_ROOT / name).rglob("*.py")):
        found.update(str(path.relative_to(_ROOT)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _build(target: Path) -> None:
    if importlib.util.find_spec("mypyc") is None or importlib.util.find_spec("setuptools") is None:
        raise SystemExit(
            "--compiled: mypyc and setuptools are missing: `pip install mypy setuptools`"
        )
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        raise SystemExit(
            f"--compiled: there is no C compiler {compiler!r}: install gcc, or name one in CC"
        )
    print(
        f"compiling {len(MODULES)} modules, once for these sources (about a minute of a core)",
        file=sys.stderr,
        flush=True,
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=target.parent) as directory:
        place = Path(directory) / "built"
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        for name in _PACKAGES:
            shutil.copytree(_ROOT / name, place / name, ignore=ignored)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "mypyc", *_OPTIONS, *MODULES],
                cwd=place,
                env={key: one for key, one in os.environ.items() if key != "PYTHONPATH"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_BUILD_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise SystemExit(
                f"--compiled: mypyc has not ended in {_BUILD_SECONDS:.0f} s; run without it"
            ) from error
        if done.returncode:
            told = "\n".join(done.stdout.splitlines()[-20:])
            raise SystemExit(
                f"--compiled: mypyc ended with {done.returncode}; run without it:\n{told}"
            )
        shutil.rmtree(place / "build", ignore_errors=True)
        shutil.rmtree(place / ".mypy_cache", ignore_errors=True)
        try:
            place.rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    for old in target.parent.iterdir():
        if old != target and not old.name.startswith(_UNFINISHED):
            shutil.rmtree(old, ignore_errors=True)
