"""Pythons that have a peer's packages (TRL ...) over what this one has; they are no dependencies.

Tests and benchmarks that compare with a peer run it as a process of its own. With
`TROUPE_REFERENCE_DIR` the environment is kept there and used again; otherwise it is made anew.
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
# Exits 1 when a pinned package is not there at its version.
_CHECK: Final = """
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    sys.exit(any(version(p.split("==")[0].split("[")[0]) != p.split("==")[1] for p in sys.argv[1:]))
except PackageNotFoundError:
    sys.exit(1)
"""


class ReferenceUnavailable(Exception):
    """The reference's packages cannot be installed here; says what pip says."""


def reference_python(packages: Sequence[str], directory: Path, apart: str = "") -> Path:
    """The interpreter of an environment that has `packages` and else what this one has.

    `packages` are pins (`name==version`). The environment is at `TROUPE_REFERENCE_DIR`, or at
    `directory` when that is not set; what is there already is used. `apart` names one of its own
    below that, for packages that suffer no others beside them. Raises `ReferenceUnavailable`.
    """
    root = Path(os.environ.get("TROUPE_REFERENCE_DIR") or directory) / apart
    root.mkdir(parents=True, exist_ok=True)
    binary = root / "bin" / "python"
    # Two runs may share the directory: the second one finds it made.
    with (root / "making.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            venv.create(root, with_pip=True)
        library = Path(sysconfig.get_path("purelib", vars={"base": str(root)}))
        (library / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
        if subprocess.run([binary, "-c", _CHECK, *packages], check=False).returncode:
            _install(binary, packages)
    return binary


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
