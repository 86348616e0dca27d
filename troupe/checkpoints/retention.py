"""Finding, pruning and copying kept checkpoints: `{job}/checkpoints/{policy}/v{version}`."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final

from troupe.checkpoints.verifying import verify
from troupe.rpc.errors import NotFound, TroupeError
from troupe.storage import LocalPlace

BEST: Final = "best"
"""Folder of a job's best checkpoint (`checkpoint.best`), laid out as `checkpoints` is."""
BEST_FILE: Final = "best.json"
"""The manifest of the best checkpoint, with the metric and its value."""
_NAME: Final = re.compile(r"v([0-9]{1,18})")
# Directories left behind by processes that were killed while writing or deleting a checkpoint.
_LEFT: Final = re.compile(r"\.v([0-9]+)\.")


def versions_in(directory: Path) -> list[tuple[int, Path]]:
    """Return (version, path) of the checkpoints in a policy's directory, ascending."""
    paths = [path for path in directory.glob("v*") if path.is_dir()]
    return sorted((int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name)))


def versions_of_all(job: Path) -> dict[str, list[tuple[int, Path]]]:
    """Return (version, path) of the checkpoints in a job's directory, by policy, including the best
    one even if newer ones have displaced it."""
    found: dict[str, dict[int, Path]] = {}
    for folder in (BEST, "checkpoints"):
        for path in sorted((job / folder).glob("*")):
            found.setdefault(path.name, {}).update(versions_in(path))
    return {policy: sorted(there.items()) for policy, there in sorted(found.items()) if there}


def exported_version(job: Path, policy: str) -> int | None:
    """Return the version of a policy that exports take by default, if the job names one
    (`stop.best: exported`); None: the newest."""
    try:
        content = json.loads((job / BEST / BEST_FILE).read_text(encoding="utf-8"))
        return int(content["policies"][policy]["version"]) if content.get("exported") else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def prune(directory: Path, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints in a policy's directory.

    Also deletes partial directories of killed processes: no version up to the newest is still being
    written.
    """
    there = versions_in(directory)
    for _, path in there[:-keep]:
        remove(path)
    newest = there[-1][0] if there else -1
    for path in directory.glob(".v*"):
        if (match := _LEFT.match(path.name)) and int(match[1]) <= newest:
            shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a directory after renaming it: an interrupted delete leaves no partial checkpoint."""
    doomed = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    with contextlib.suppress(OSError):
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def none_such(policy: str, version: int | None, known: Iterable[str]) -> NotFound:
    """Return the error for a version without a kept checkpoint; `known`: the kept ones, for its
    message."""
    wanted = policy if version is None else f"{policy}@{version}"
    return NotFound(
        f"there is no checkpoint of {wanted}; there are: {', '.join(known) or 'none'}",
        field="policy" if version is None else "version",
        value=wanted,
        remedy="Checkpoints are written every `checkpoint.every` steps and after the last.",
    )


def choose(data_dir: Path, job_id: str, policy: str | None, version: int | None) -> Path:
    """Return the directory of a kept checkpoint; by default of the only policy and its newest
    version, or the best one where `stop.best` says `exported`.

    Raises `NotFound`, naming the checkpoints that exist.
    """
    job = data_dir / job_id
    if not job_id or not job.is_dir():
        raise NotFound(
            f"there is no job with this id in {data_dir}",
            field="job_id",
            value=job_id,
            remedy="Name the data directory with --data-dir, or a running cluster with --cluster.",
        )
    kept = versions_of_all(job)
    policy = only_policy(kept, policy)
    if policy not in kept:
        policy = played_in(job, policy)
    version = exported_version(job, policy) if version is None else version
    found = [path for at, path in kept.get(policy, []) if version in (None, at)]
    if not found:
        raise none_such(policy, version, [f"{p}@{v}" for p in kept for v, _ in kept[p]])
    return found[-1]


def played_in(job: Path, name: str) -> str:
    """Return the policy that plays the agent `name` in a job's directory; `name` itself if this is
    unknown."""
    # Imported here because it is slow and few calls need it.
    from troupe.job.loading import SPEC_FILE, load_text, read_mapping
    from troupe.job.spec import policy_of

    try:
        return policy_of(read_mapping(load_text(job / SPEC_FILE)), name)
    except (TroupeError, ValueError, AttributeError, LookupError, TypeError):
        return name


def only_policy(kept: Collection[str], policy: str | None) -> str:
    """Return `policy`, or by default the only policy with checkpoints.

    Raises `NotFound` if there are none, or several to choose from.
    """
    if policy is not None:
        return policy
    if len(kept) == 1:
        return next(iter(kept))
    raise NotFound(
        "the job has checkpoints of several policies" if kept else "the job has no checkpoint",
        field="--policy",
        value=", ".join(kept) or None,
        remedy="Name one with --policy."
        if kept
        else "Checkpoints are written every `checkpoint.every` steps and after the last.",
    )


def copy_checkpoint(
    checkpoint: Path, to: str | Path, progress: Callable[[int], None] = lambda nbytes: None
) -> Path:
    """Copy a checkpoint into the new directory `to`, atomically; `progress` gets the copied bytes.

    Raises `FailedPrecondition` if `to` exists or cannot be written, `ResourceExhausted` if its disk
    is full, `DataLoss` if the checkpoint is damaged.
    """
    place = LocalPlace(Path(to))
    with place.new_folder() as draft:
        copy_files(checkpoint, draft, progress)
    return place.path


def copy_files(checkpoint: Path, folder: Path, progress: Callable[[int], None]) -> None:
    """Copy the files of a checkpoint into an empty folder, and check the copies.

    Raises OSError, and `DataLoss` if the checkpoint is damaged.
    """
    for file in sorted(one for one in checkpoint.rglob("*") if one.is_file()):
        copy = folder / file.relative_to(checkpoint)
        copy.parent.mkdir(parents=True, exist_ok=True)
        # File modes are not copied, since services write files that only their user can read.
        shutil.copyfile(file, copy)
        progress(copy.stat().st_size)
    verify(folder, called=str(checkpoint))
