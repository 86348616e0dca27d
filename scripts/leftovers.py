"""Finds files that a run of the suite left in the working tree.

`python -m scripts.leftovers` prints the state of the tree; `python -m scripts.leftovers FILE`
compares it with the state that FILE holds, and exits with 1 when files have appeared or changed.
Tests write to `tmp_path`: a file in the tree is committed sooner or later.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
# Where the path begins in a line of `state`: after the digest, a space and git's "?? ".
_PATH: Final = 64 + 1 + 3


def state(root: Path = ROOT) -> list[str]:
    """Return files that differ from HEAD and that git does not ignore: a digest of the content, the
    status and the path of each. Empty outside a git checkout."""
    command = ["git", "status", "--porcelain", "--untracked-files=all", "-z"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        return []
    found = []
    for line in filter(None, done.stdout.split("\0")):
        path = root / line[3:]
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found.append(f"{digest:64} {line}")
    return found


def left(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return paths that appeared or changed between two states."""
    known = set(before)
    return [line[_PATH:] for line in after if line not in known]


def main() -> int:
    """Command line: prints a state, or what is left since one; 1 when something is."""
    if not sys.argv[1:]:
        print("\n".join(state()))
        return 0
    found = left(Path(sys.argv[1]).read_text().splitlines(), state())
    for path in found:
        print(f"the suite left {path} in the working tree: have the test write to tmp_path")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
