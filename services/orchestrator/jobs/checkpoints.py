"""Checkpoints on disk: listing, copying from trainers, export as a stream, and manifests.

A checkpoint is a directory `{data_dir}/{job}/checkpoints/{policy}/v{version}`, written atomically.
A manifest lists the checkpoints of all policies that belong together.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from services.chassis.folders import files_below, read_folder, write_folder
from services.orchestrator.context import JobContext
from services.orchestrator.placement.workers import WorkerHandle
from services.orchestrator.state.records import timestamp
from troupe.checkpoints.retention import (
    BEST,
    BEST_FILE,
    exported_version,
    none_such,
    prune,
    remove,
    versions_of_all,
)
from troupe.disks import replace_file
from troupe.job import JobSpec
from troupe.job.sections.run import EarlyStopSpec
from troupe.rpc import Aborted, ResourceExhausted
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import trainer_pb2 as trainer_pb

_MANIFEST_NAME: Final = re.compile(r"manifest-step([0-9]+)\.json")


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
    """Return a policy's checkpoint of a version, by default the newest, or the best one where
    `stop.best` says `exported`. Raises `NotFound`."""
    every = list_checkpoints(directory)
    version = exported_version(directory, policy) if version is None else version
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
        content = json.loads((directory / BEST / BEST_FILE).read_text(encoding="utf-8"))
        return float(content["value"]) if content["metric"] == metric else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep_best(
    directory: Path,
    step: int,
    versions: Mapping[str, float],
    metric: str,
    value: float,
    *,
    exported: bool = False,
) -> bool:
    """Keep the checkpoint after `step` steps regardless of newer ones.

    Its files are linked, so both checkpoints share the space while they exist. The former best one
    stays until this one is complete. Returns False and keeps nothing if the checkpoint is not of
    `versions`, by policy, to which `value` belongs. `exported`: exports take it by default. Raises
    `OSError`.
    """
    manifest = json.loads((directory / "checkpoints" / f"manifest-step{step}.json").read_text())
    if any(one["version"] != versions.get(p) for p, one in manifest["policies"].items()):
        return False
    content = {**manifest, "metric": metric, "value": value, "exported": exported}
    folder = directory / BEST
    kept = set()
    for policy, one in manifest["policies"].items():
        target = folder / policy / f"v{one['version']}"
        kept.add(target)
        link_folder(directory / one["path"], target)
    _write_best(directory, content)
    for path in folder.glob("*/*"):
        if path not in kept:
            remove(path)
    return True


def mark_best(directory: Path, stop: EarlyStopSpec | None) -> None:
    """Have exports take the best checkpoint by default, or not, as `stop` says now: a resumed job
    may have another one. Raises `OSError`."""
    try:
        content = json.loads((directory / BEST / BEST_FILE).read_text(encoding="utf-8"))
        exported = stop is not None and stop.best == "exported" and content["metric"] == stop.metric
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return
    if content.get("exported") != exported:
        _write_best(directory, {**content, "exported": exported})


def _write_best(directory: Path, content: Mapping[str, Any]) -> None:
    replace_file(directory / BEST / BEST_FILE, json.dumps(content, indent=2) + "\n")


def link_folder(source: Path, target: Path) -> None:
    """Make the directory `target`, unless it exists, of links to the files of `source`: they stay
    when `source` is deleted. Raises `OSError`."""
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}.new")
    try:
        shutil.copytree(source, scratch, copy_function=_link)
        scratch.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """Link a file, or copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def manifest(
    spec: JobSpec,
    directory: Path,
    step: int,
    last: store_pb.GetStepResponse,
    weights: Mapping[str, common_pb.WeightsRef],
    saved: Mapping[str, trainer_pb.SaveCheckpointResponse],
) -> dict[str, Any]:
    """Return the manifest of the checkpoints after `step` steps, as JSON.

    Paths are relative to the job's `directory`, which may be moved. `last` is the newest step as
    the store has it, `weights` the newest committed ones, `saved` the checkpoint of every trained
    policy. The same arguments give the same bytes.
    """
    commits = {commit.policy: commit for commit in last.commits}
    return {
        "step": step,
        "spec_hash": spec_hash(spec),
        # The seed and a query's index determine all randomness of rollout.
        "seed": spec.seed,
        # First item of the training split not taken by any step.
        "cursor": last.cursor,
        "policies": {
            policy: {
                "version": weights[policy].version,
                "checksum": weights[policy].checksum,
                "path": _relative_to(directory, saved[policy].path),
                "frontier": _frontier(commits[policy]),
            }
            for policy in sorted(saved)
        },
    }


def _relative_to(directory: Path, path: str) -> str:
    """Return the path, relative to the directory if it is inside."""
    with suppress(ValueError):
        return str(Path(path).relative_to(directory))
    return path


def _frontier(commit: store_pb.StepCommit) -> dict[str, Any]:
    """Return the store's counts of trained samples up to a policy's commit."""
    digest = f"{commit.samples_digest:016x}" if commit.HasField("samples_digest") else None
    return {
        "committed_step": commit.step,
        "outcome": store_pb.StepOutcome.Name(commit.outcome).removeprefix("STEP_OUTCOME_"),
        "samples": commit.num_samples,
        "samples_digest": digest,
    }


def spec_hash(spec: JobSpec) -> str:
    """Return a hash of the specification with its defaults filled in: hex blake2b-128."""
    text = json.dumps(spec.model_dump(mode="json"), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write_manifest(directory: Path, content: Mapping[str, Any], keep: int) -> Path:
    """Write a manifest into a job's `directory` atomically and keep the newest `keep` of them.

    Raises `OSError`.
    """
    folder = directory / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"manifest-step{content['step']}.json"
    replace_file(path, json.dumps(content, indent=2) + "\n", sync=True)
    named = ((_MANIFEST_NAME.fullmatch(one.name), one) for one in folder.iterdir())
    there = {int(match[1]): one for match, one in named if match}
    for old in sorted(there)[:-keep]:
        there[old].unlink(missing_ok=True)
    return path
