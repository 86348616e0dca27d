"""Checkpoints in a data directory, for when nothing runs there."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from troupe.checkpoints.kept import none_such, versions_of_all
from troupe.checkpoints.verifying import verify
from troupe.client.export import publish, scratch_beside, target_path
from troupe.rpc.errors import NotFound


def choose(data_dir: Path, job_id: str, policy: str | None, version: int | None) -> Path:
    """The checkpoint's directory; default: the only policy, the newest version.

    Raises `NotFound`, naming what there is.
    """
    job = data_dir / job_id
    if not job_id or not job.is_dir():
        raise NotFound(
            f"there is no job of this id in {data_dir}",
            field="job_id",
            value=job_id,
            remedy="Name the data directory with --data-dir, or a running cluster with --cluster.",
        )
    kept = versions_of_all(job)
    policy = only_policy(kept, policy)
    found = [path for at, path in kept.get(policy, []) if version in (None, at)]
    if not found:
        raise none_such(policy, version, [f"{p}@{v}" for p in kept for v, _ in kept[p]])
    return found[-1]


def only_policy(kept: Collection[str], policy: str | None) -> str:
    """`policy`, or the one that has checkpoints. Raises `NotFound` where one has to be named."""
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


def copy_checkpoint(checkpoint: Path, to: str | Path) -> Path:
    """Copy a checkpoint into the new directory `to`, which appears when it is whole.

    Raises `FailedPrecondition` when `to` is taken or cannot be written, `DataLoss` when the
    checkpoint is damaged.
    """
    target = target_path(to)
    scratch = scratch_beside(target)
    try:
        # Not with their modes: services keep what they write to their user.
        shutil.copytree(checkpoint, scratch, copy_function=shutil.copyfile, dirs_exist_ok=True)
        for below in scratch.rglob("*/"):
            below.chmod(0o755)
        verify(scratch, called=str(checkpoint))
        publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
