"""Python environments with a peer's packages (TRL ...) in addition to this one's packages.

The peers are not dependencies: tests and benchmarks that compare with one run it as a separate
process. With `TROUPE_REFERENCE_DIR` the environment is kept there and reused; otherwise it is made
each time.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

TRL: Final = "trl==1.16.0"
_MAKE_SECONDS: Final = 600.0
# Exits with 1 if a pinned package is missing or has another version.
_CHECK: Final = """
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    sys.exit(any(version(p.split("==")[0].split("[")[0]) != p.split("==")[1] for p in sys.argv[1:]))
except PackageNotFoundError:
    sys.exit(1)
"""


class ReferenceUnavailable(Exception):
    """The reference's packages cannot be installed here; the message is pip's."""


def reference_python(packages: Sequence[str], directory: Path, apart: str = "") -> Path:
    """Return the interpreter of an environment with `packages` in addition to this one's packages.

    `packages` are pins (`name==version`). The environment is at `TROUPE_REFERENCE_DIR`, or at
    `directory` if that is not set; an existing one is reused. `apart` names a separate environment
    below it, for packages that conflict with others. Raises `ReferenceUnavailable`.
    """
    root = Path(os.environ.get("TROUPE_REFERENCE_DIR") or directory) / apart
    root.mkdir(parents=True, exist_ok=True)
    binary = root / "bin" / "python"
    # Two runs may share the directory: the second one finds the environment.
    with (root / "making.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            venv.create(root, with_pip=True)
        library = Path(sysconfig.get_path("purelib", vars={"base": str(root)}))
        (library / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
        if subprocess.run([binary, "-c", _CHECK, *packages], check=False).returncode:
            _install(binary, packages)
    return binary


def peer_environment(threads: int) -> dict[str, str]:
    """Return a peer's environment variables: this process's, with a thread budget of its own."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}


def _install(binary: Path, packages: Sequence[str]) -> None:
    command = [str(binary), "-m", "pip", "install", "--quiet", *packages]
    try:
        made = subprocess.run(
            command, capture_output=True, text=True, timeout=_MAKE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        message = f"pip took over {_MAKE_SECONDS:.0f} s to install {', '.join(packages)}"
        raise ReferenceUnavailable(message) from error
    if made.returncode:
        message = f"pip cannot install {', '.join(packages)}: {made.stderr.strip()[-300:]}"
        raise ReferenceUnavailable(message)
