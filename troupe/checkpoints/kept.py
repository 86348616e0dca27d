"""Checkpoints that are kept of a policy: `{job}/checkpoints/{policy}/v{version}`."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from troupe.rpc.errors import NotFound

_NAME: Final = re.compile(r"v([0-9]{1,18})")
# What a process that was killed left of one that it wrote or deleted.
_LEFT: Final = re.compile(r"\.v([0-9]+)\.")


def versions_in(directory: Path) -> list[tuple[int, Path]]:
    """Those in the directory of a policy, ascending."""
    paths = [path for path in directory.glob("v*") if path.is_dir()]
    return sorted((int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name)))


def versions_of_all(job: Path) -> dict[str, list[tuple[int, Path]]]:
    """Those of all policies that have any, in the directory of a job."""
    found = {path.name: versions_in(path) for path in sorted((job / "checkpoints").glob("*"))}
    return {policy: versions for policy, versions in found.items() if versions}


def prune(directory: Path, keep: int) -> None:
    """Delete all but the `keep` newest in the directory of a policy, and what killed processes
    left there: versions up to the newest are written no more."""
    there = versions_in(directory)
    for _, path in there[:-keep]:
        remove(path)
    newest = there[-1][0] if there else -1
    for path in directory.glob(".v*"):
        if (match := _LEFT.match(path.name)) and int(match[1]) <= newest:
            shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a directory: whoever dies at it leaves none of this name with half its files."""
    doomed = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    with contextlib.suppress(OSError):
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def none_such(policy: str, version: int | None, known: Iterable[str]) -> NotFound:
    """Of a version that is not kept, or of a policy without one; `known`: what there is."""
    wanted = policy if version is None else f"{policy}@{version}"
    return NotFound(
        f"there is no checkpoint of {wanted}; there are: {', '.join(known) or 'none'}",
        field="policy" if version is None else "version",
        value=wanted,
        remedy="Checkpoints are written every `checkpoint.every` steps and after the last.",
    )
