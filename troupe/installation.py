"""The check that no other project's package `troupe` is installed together with this one.

The distribution `troupe` on PyPI is another project; this one is `troupe-rl`. Both install a
package and a command `troupe`, so in one environment the later installation overwrites files of the
earlier one, and uninstalling either removes files of both.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Final

_COMMAND: Final = "troupe.client.cli.app:main"


def refuse_other_troupe() -> None:
    """Raise ImportError if the other project's `troupe` is installed in this environment.

    The command `troupe` exits with the message instead of a traceback. This lists the folders of
    `sys.path` instead of importing `importlib.metadata`, which takes longer than the rest of
    `import troupe`; every sandbox pays for it.
    """
    for folder in sys.path:
        with contextlib.suppress(OSError):  # not a folder, or one that a sandbox hides
            for name in os.listdir(folder or "."):
                if name.startswith("troupe-") and name.endswith(".dist-info"):
                    _check(Path(folder, name))


def _check(installed: Path) -> None:
    """Raise unless `installed` is metadata of this project, from before its name was
    `troupe-rl`."""
    entry_points = installed / "entry_points.txt"
    if entry_points.exists() and _COMMAND in entry_points.read_text():
        return
    version = installed.name.removeprefix("troupe-").removesuffix(".dist-info")
    message = (
        f"the package troupe {version} in {installed.parent.absolute()} is another project, whose "
        "files mix with troupe-rl's. Run `pip uninstall troupe`, then "
        "`pip install --force-reinstall --no-deps troupe-rl` (or the wheel's path instead of the "
        "name). In a checkout `make -B setup` does both."
    )
    if Path(sys.argv[0]).name == "troupe":
        raise SystemExit(f"error: {message}")
    raise ImportError(message)
