"""Interpreters of environments with libraries that cannot be installed together with Troupe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

# Environments that anybody can install, unchanged, and the library that each is for.
TASKSETS: Final = ("verifiers==0.4.0", "marble-v1==0.1.0")
RUBRICS: Final = ("verifiers==0.1.14", "staros-stardata[env]==0.1.1")
OWN: Final = Path(__file__).with_name("verifiers_envs")


def own_python(directory: Path, packages: tuple[str, ...]) -> str:
    """Return the interpreter of an environment with only `packages`. Skip the test if they cannot
    be installed."""
    name = packages[0].replace("==", "-")
    place = Path(os.environ.get("TROUPE_REFERENCE_DIR") or directory) / name
    python = place / "bin" / "python"
    if not (place / "made").exists():
        uv = str(Path(sys.executable).with_name("uv"))
        for command in (
            [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(place)],
            [
                uv,
                "pip",
                "install",
                "--quiet",
                "--compile-bytecode",
                "--python",
                str(python),
                *packages,
            ],
        ):
            made = subprocess.run(command, capture_output=True, text=True, timeout=500)
            if made.returncode:
                pytest.skip(f"{name} cannot be installed: {made.stderr[-300:]}")
        (place / "made").touch()
    return str(python)
