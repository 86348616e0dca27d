"""`replicas: auto` and `gang: auto` of a job that starts, decided on the cluster's devices.

The rule is `troupe.job.automatic.decide`. What it decides is stored with the job, so that an
orchestrator that takes the job over does not decide otherwise; a job that is resumed is decided
anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

import structlog

from services.orchestrator.context import JobContext, Shared
from services.orchestrator.placement.nodes import jobs_on
from services.orchestrator.placement.workers import WorkerHandle
from services.orchestrator.state.records import JobRecord
from troupe.job.automatic import (
    AUTOMATIC,
    JobDevices,
    decide,
    is_open,
    launched_policies,
    with_values,
)
from troupe.job.engines.sharing import AUTO, EngineGroup, engine_groups
from troupe.job.sizing import shapes_of
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

_log = structlog.get_logger(__name__)
# A node reports a second after its workers have started.
_REPORT_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.1
_ROLLOUT: Final = orchestrator_pb.WORKER_KIND_ROLLOUT
_TRAINER: Final = orchestrator_pb.WORKER_KIND_TRAINER


async def settled(job: JobContext, record: JobRecord, ended: Collection[str]) -> JobContext:
    """Return the job with a number for each `auto`, which is stored and shown to users. On the
    job's first start warn of devices that stay idle. `ended`: jobs whose engines are being
    released."""
    shared, spec = job.shared, job.spec
    first = record.state == common_pb.JOB_STATE_SUBMITTED
    decided = record.decided
    if is_open(spec) or (first and launched_policies(spec)):
        await _reports(shared)
        workers = (*shared.workers.usable(_ROLLOUT), *shared.workers.usable(_TRAINER))
        devices = job_devices(shared.nodes.alive(), workers, {job.job_id, *ended})
        found = decide(spec, devices, await asyncio.to_thread(shapes_of, spec))
        if found.values:
            decided = {one: (found.values[one], found.sources[one]) for one in found.values}
            await shared.store.note_decided(job.job_id, job.epoch, decided)
            spec = with_values(spec, found.values)
            job = replace(job, spec=spec, spec_json=spec.model_dump_json())
        for sentence in found.notes if first else ():
            await job.warn(sentence)
    groups = engine_groups(spec)
    for group in groups if first else ():
        await job.info(str(group))
    settings = [
        common_pb.ResolvedSetting(field=field, value=str(number), source=source)
        for field, (number, source) in decided.items()
    ]
    settings += [
        common_pb.ResolvedSetting(
            field=f"policies.{name}.engine.share",
            value=group.name,
            source=_origin(spec.policies[name].engine.share, group),
        )
        for group in groups
        for name in group.policies
    ]
    await shared.store.note_resolved(job.job_id, settings)
    return job


def _origin(share: str, group: EngineGroup) -> str:
    """Return the source of a policy's group, for people."""
    start = AUTOMATIC if share == AUTO else "given: "
    return f"{start}{group}"


def job_devices(
    nodes: Mapping[str, orchestrator_pb.JoinNodeRequest],
    workers: Iterable[WorkerHandle],
    own: Collection[str],
) -> JobDevices:
    """Return the devices that engines and trainers of a job find.

    Nodes say which process has which devices, also of trainers that start on demand; workers that
    no node started say so themselves. Devices that engines hold of jobs other than
    `own`, the job itself and those that release theirs, do not count.
    """
    # By kind and process: the number of devices.
    counts: dict[str, dict[tuple[str, str], int]] = {"rollout": {}, "trainer": {}}
    memory: list[int] = []
    held: set[tuple[str, int]] = set()
    joins = True

    def add(kind: str, process: tuple[str, str], one: _AnyDevice, *, free: bool = True) -> None:
        if kind in counts and one.device_class.lower() != "cpu":
            counts[kind][process] = counts[kind].get(process, 0) + free
            if kind == "trainer" and one.memory_bytes:
                memory.append(one.memory_bytes)

    for worker in workers:
        beat, kind = worker.beat, "trainer" if worker.kind == _TRAINER else "rollout"
        joins &= kind == "rollout" or beat.trainer.lends or not beat.trainer.ranks
        for device in beat.devices:
            foreign = kind == "rollout" and bool(jobs_on(device) - set(own))
            if beat.node not in nodes:
                add(kind, ("", worker.worker_id), device, free=not foreign)
            elif foreign:
                held.add((beat.node, device.index))
        alone = "", worker.worker_id
        if kind == "trainer" and not beat.trainer.lends and alone in counts[kind]:
            # Hosts of a gang that a scheduler gave to this worker.
            counts[kind][alone] = max(counts[kind][alone], beat.trainer.ranks)
    for name, report in nodes.items():
        for given in report.devices:
            for process in given.process.split(", "):
                kind = process.partition("-")[0]
                free = kind != "rollout" or (name, given.index) not in held
                add(kind, (name, process), given, free=free)
    return JobDevices(
        min(counts["rollout"].values(), default=0),
        tuple(sorted(counts["trainer"].values())),
        min(memory, default=0),
        joins=joins,
    )


_AnyDevice = orchestrator_pb.NodeDevice | orchestrator_pb.GivenDevice


async def _reports(shared: Shared) -> None:
    """Wait until the nodes of all workers have reported, for a while."""
    end = time.monotonic() + _REPORT_SECONDS
    while time.monotonic() < end:
        named = {one.beat.node for one in shared.workers.all() if one.usable} - {""}
        if not (missing := named - shared.nodes.alive().keys()):
            return
        await asyncio.sleep(_POLL_SECONDS)
    _log.warning("nodes have not reported their devices", nodes=sorted(missing))
