"""Checkpoints on disk: listing, copying from trainers, and export as a stream.

A checkpoint is a directory `{data_dir}/{job}/checkpoints/{policy}/v{version}`, written atomically.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from services.chassis.folders import files_below, read_folder, write_folder
from services.orchestrator.context import JobContext
from services.orchestrator.placement.workers import WorkerHandle
from services.orchestrator.state.records import timestamp
from troupe.checkpoints.retention import BEST, none_such, prune, remove, versions_of_all
from troupe.rpc import Aborted, ResourceExhausted
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import trainer_pb2 as trainer_pb

# Manifest of the best checkpoint, with the metric and its value.
_BEST_FILE: Final = "best.json"


async def copy_to_job_directory(
    job: JobContext,
    worker: WorkerHandle,
    request: trainer_pb.SaveCheckpointRequest,
    saved: trainer_pb.SaveCheckpointResponse,
    seconds: float,
) -> trainer_pb.SaveCheckpointResponse:
    """Copy a checkpoint that a trainer on another host saved into the job's directory here.

    Raises the worker's `TroupeError`, or `ResourceExhausted` of kind "storage_full" when there is
    no space here.
    """
    target = job.directory / "checkpoints" / request.policy / f"v{request.version}"
    if await asyncio.to_thread(target.is_dir):
        return saved
    read = trainer_pb.ReadCheckpointRequest(
        job_id=request.job_id, policy=request.policy, version=request.version
    )
    try:
        size = await write_folder(target, worker.trainer.ReadCheckpoint(read, timeout=seconds))
    except OSError as error:
        raise ResourceExhausted(
            f"{target} cannot be written: {error.strerror}",
            kind="storage_full",
            field="data_dir",
            value=job.directory,
            remedy="Free space on the orchestrator's host, or set TROUPE_DATA_DIR elsewhere.",
        ) from error
    await asyncio.to_thread(prune, target.parent, job.spec.checkpoint.keep)
    return trainer_pb.SaveCheckpointResponse(path=str(target), num_bytes=size)


def list_checkpoints(directory: Path) -> list[orchestrator_pb.Checkpoint]:
    """Return the checkpoints in a job's directory, by policy, oldest version first."""
    found = []
    for policy, versions in versions_of_all(directory).items():
        for version, path in versions:
            with suppress(FileNotFoundError):  # older ones may be removed at any time
                found.append(
                    orchestrator_pb.Checkpoint(
                        policy=policy,
                        version=version,
                        path=str(path),
                        num_bytes=sum(file.stat().st_size for file in files_below(path)),
                        saved_at=timestamp(path.stat().st_mtime),
                    )
                )
    return found


def find_checkpoint(
    directory: Path, policy: str, version: int | None
) -> orchestrator_pb.Checkpoint:
    """Return a policy's checkpoint of a version, by default the newest. Raises `NotFound`."""
    every = list_checkpoints(directory)
    found = [one for one in every if one.policy == policy and version in (None, one.version)]
    if found:
        return found[-1]
    raise none_such(policy, version, [f"{one.policy}@{one.version}" for one in every])


async def export(
    checkpoint: orchestrator_pb.Checkpoint,
) -> AsyncIterator[orchestrator_pb.ExportCheckpointResponse]:
    """Yield the files of a checkpoint in chunks; the last chunk of each file has its xxh3-64
    checksum.

    Raises `Aborted` when newer checkpoints replace it meanwhile (`checkpoint.keep`).
    """
    try:
        async for chunk in read_folder(
            Path(checkpoint.path), orchestrator_pb.ExportCheckpointResponse
        ):
            yield chunk
    except FileNotFoundError as error:
        raise Aborted(
            f"the checkpoint {checkpoint.policy}@{checkpoint.version} was removed meanwhile",
            field="version",
            value=checkpoint.version,
            remedy="Export a newer one, or raise `checkpoint.keep`.",
        ) from error


def best_value(directory: Path, metric: str) -> float | None:
    """Return the value of `metric` of a job's best checkpoint; None if there is none."""
    try:
        content = json.loads((directory / BEST / _BEST_FILE).read_text(encoding="utf-8"))
        return float(content["value"]) if content["metric"] == metric else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep_best(
    directory: Path, step: int, versions: Mapping[str, float], metric: str, value: float
) -> bool:
    """Keep the checkpoint after `step` steps regardless of newer ones.

    Its files are linked, so both checkpoints share the space while they exist. The former best one
    stays until this one is complete. Returns False and keeps nothing if the checkpoint is not of
    `versions`, by policy, to which `value` belongs. Raises `OSError`.
    """
    manifest = json.loads((directory / "checkpoints" / f"manifest-step{step}.json").read_text())
    if any(one["version"] != versions.get(p) for p, one in manifest["policies"].items()):
        return False
    content = {**manifest, "metric": metric, "value": value}
    folder = directory / BEST
    kept = set()
    for policy, one in manifest["policies"].items():
        target = folder / policy / f"v{one['version']}"
        kept.add(target)
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}.new")
            shutil.copytree(directory / one["path"], scratch, copy_function=_link)
            scratch.replace(target)
    draft = folder / f".{_BEST_FILE}.new"
    draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draft.replace(folder / _BEST_FILE)
    for path in folder.glob("*/*"):
        if path not in kept:
            remove(path)
    return True


def _link(source: str, target: str) -> None:
    """Link a file, or copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
