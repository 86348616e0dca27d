"""Checkpoints of trainers on other hosts, brought into this orchestrator's `data_dir`.

People list, export and resume from them here, so they must not be lost with a trainer's disk.
Where hosts share the directory they are here already.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from services.chassis.folders import Chunk, write_folder
from services.orchestrator.context import JobContext
from services.orchestrator.workers import Worker
from troupe.checkpoints.kept import prune
from troupe.rpc import ResourceExhausted
from troupe.v1 import trainer_pb2 as tr


async def at_hand(
    job: JobContext,
    worker: Worker,
    request: tr.SaveCheckpointRequest,
    saved: tr.SaveCheckpointResponse,
    seconds: float,
) -> tr.SaveCheckpointResponse:
    """`saved`, in a directory of this host.

    Raises `TroupeError`: what the worker raises, or `ResourceExhausted` of kind "storage_full"
    when there is no room here.
    """
    target = job.directory / "checkpoints" / request.policy / f"v{request.version}"
    if await asyncio.to_thread(target.is_dir):
        return saved
    read = tr.ReadCheckpointRequest(
        job_id=request.job_id, policy=request.policy, version=request.version
    )

    async def chunks() -> AsyncIterator[Chunk]:
        async for one in worker.trainer.ReadCheckpoint(read, timeout=seconds):
            yield Chunk(one.path, one.data, one.end_of_file, one.checksum)

    try:
        size = await write_folder(target, chunks())
    except OSError as error:
        raise ResourceExhausted(
            f"{target} cannot be written: {error.strerror}",
            kind="storage_full",
            field="data_dir",
            value=job.directory,
            remedy="Free space on the orchestrator's host, or set TROUPE_DATA_DIR elsewhere.",
        ) from error
    await asyncio.to_thread(prune, target.parent, job.spec.checkpoint.keep)
    return tr.SaveCheckpointResponse(path=str(target), num_bytes=size)
