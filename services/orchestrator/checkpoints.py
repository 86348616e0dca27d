"""Checkpoints on disk: what there is, and its files as a stream.

The trainer writes them as `{data_dir}/{job}/checkpoints/{policy}/v{version}`, complete or not at
all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from services.chassis.folders import files_below, read_folder
from services.orchestrator.records import timestamp
from troupe.checkpoints.kept import none_such, versions_of_all
from troupe.rpc import Aborted
from troupe.v1 import orchestrator_pb2 as orch


def list_checkpoints(directory: Path) -> list[orch.Checkpoint]:
    """The checkpoints of the job that lives in `directory`, by policy, oldest version first."""
    found = []
    for policy, versions in versions_of_all(directory).items():
        for version, path in versions:
            with suppress(FileNotFoundError):  # older ones are removed at any time
                found.append(
                    orch.Checkpoint(
                        policy=policy,
                        version=version,
                        path=str(path),
                        num_bytes=sum(file.stat().st_size for file in files_below(path)),
                        saved_at=timestamp(path.stat().st_mtime),
                    )
                )
    return found


def find_checkpoint(directory: Path, policy: str, version: int | None) -> orch.Checkpoint:
    """A checkpoint of a policy, by default the newest. Raises `NotFound`, naming what there is."""
    every = list_checkpoints(directory)
    found = [one for one in every if one.policy == policy and version in (None, one.version)]
    if found:
        return found[-1]
    raise none_such(policy, version, [f"{one.policy}@{one.version}" for one in every])


async def export(checkpoint: orch.Checkpoint) -> AsyncIterator[orch.ExportCheckpointResponse]:
    """The files of a checkpoint in chunks; the last chunk of each carries its xxh3-64.

    Raises `Aborted` when the checkpoint is removed meanwhile, since newer ones took its place.
    """
    try:
        async for chunk in read_folder(Path(checkpoint.path)):
            yield orch.ExportCheckpointResponse(
                path=chunk.path,
                data=chunk.data,
                end_of_file=chunk.end_of_file,
                checksum=chunk.checksum,
            )
    except FileNotFoundError as error:
        raise Aborted(
            f"the checkpoint {checkpoint.policy}@{checkpoint.version} was removed meanwhile",
            field="version",
            value=checkpoint.version,
            remedy="Export a newer one, or raise `checkpoint.keep`.",
        ) from error
