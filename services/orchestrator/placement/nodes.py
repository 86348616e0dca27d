"""Nodes of the cluster, their devices, and the check for devices of a new job's engines."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Final

import structlog

from services.orchestrator.placement.workers import WorkerHandle
from services.orchestrator.settings import OrchestratorSettings
from troupe.devices import NODE_PROTOCOL
from troupe.job import JobSpec
from troupe.job.automatic import devices_of_engines
from troupe.rpc import AlreadyExists, FailedPrecondition, InvalidArgument
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

_log = structlog.get_logger(__name__)
# How long lost nodes stay listed.
_REMEMBER_SECONDS: Final = 120.0
_LONGEST_NAME: Final = 256


class NodeRegistry:
    """All reporting nodes. A node is lost after as many missed reports as a worker after missed
    heartbeats."""

    def __init__(
        self, settings: OrchestratorSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        # Newest report and its arrival time, by name.
        self._nodes: dict[str, tuple[orchestrator_pb.JoinNodeRequest, float]] = {}

    def join(self, report: orchestrator_pb.JoinNodeRequest) -> orchestrator_pb.JoinNodeResponse:
        """Handle a node's report; the response has the settings that its workers need.

        Raises `InvalidArgument` for a missing name, `FailedPrecondition` of kind
        "protocol_mismatch", and `AlreadyExists` of kind "node_exists" while another living node has
        the name.
        """
        if report.protocol != NODE_PROTOCOL:
            raise FailedPrecondition(
                f"the node speaks version {report.protocol} of the protocol between head and "
                f"nodes, this head version {NODE_PROTOCOL}",
                kind="protocol_mismatch",
                field="protocol",
                value=report.protocol,
                remedy="Install the same release of Troupe on the head and on all nodes.",
            )
        for field in ("name", "instance"):
            if not 0 < len(getattr(report, field)) <= _LONGEST_NAME:
                raise InvalidArgument(
                    f"is empty or longer than {_LONGEST_NAME} characters",
                    field=field,
                    remedy="Name the node: --name.",
                )
        known = self._nodes.get(report.name)
        if known is not None and known[0].instance != report.instance:
            if self._alive(known[1]):
                raise AlreadyExists(
                    f"a node of this name runs on {known[0].host}",
                    kind="node_exists",
                    field="name",
                    value=report.name,
                    remedy="Give each node its own name (--name), or stop the other one; a node "
                    f"that died is forgotten {self._lost_seconds:g} s after its last report.",
                )
            known = None
        if known is None and not report.leaving:
            _log.info("node joined", node=report.name, devices=len(report.devices))
        if report.leaving:
            self._nodes.pop(report.name, None)
        else:
            self._nodes[report.name] = (report, self._clock())
        return orchestrator_pb.JoinNodeResponse(
            next_seconds=self._settings.heartbeat_seconds,
            experience_store_address=self._settings.experience_store_address,
            reward_address=self._settings.reward_address,
        )

    def statuses(self, workers: Iterable[WorkerHandle]) -> list[orchestrator_pb.NodeStatus]:
        """Return each node with its devices and their use by the living `workers`."""
        now = self._clock()
        self._nodes = {
            name: (report, seen)
            for name, (report, seen) in self._nodes.items()
            if now - seen < _REMEMBER_SECONDS
        }
        holders: dict[tuple[str, int], list[str]] = {}
        for worker in workers:
            for one in worker.beat.devices if worker.alive else ():
                holders.setdefault((worker.beat.node, one.index), []).extend(one.holders)
        found = []
        for name, (report, seen) in sorted(self._nodes.items()):
            status = orchestrator_pb.NodeStatus(
                name=name,
                host=report.host,
                alive=self._alive(seen),
                seconds_since_heartbeat=now - seen,
                devices=report.devices,
            )
            for device in status.devices:
                device.holders.extend(holders.get((name, device.index), ()))
            found.append(status)
        return found

    def alive(self) -> dict[str, orchestrator_pb.JoinNodeRequest]:
        """Return the newest reports of the living nodes, by name."""
        return {
            name: report
            for name, (report, seen) in sorted(self._nodes.items())
            if self._alive(seen)
        }

    @property
    def _lost_seconds(self) -> float:
        return self._settings.heartbeat_seconds * self._settings.lost_after_beats

    def _alive(self, seen: float) -> bool:
        return self._clock() - seen < self._lost_seconds


def jobs_on(device: orchestrator_pb.GivenDevice) -> set[str]:
    """Return the jobs whose engines hold a device; an engine's id begins with its job's."""
    return {engine_id.partition(".")[0] for engine_id in device.holders}


def check_devices(
    spec: JobSpec,
    workers: Iterable[WorkerHandle],
    *,
    leaving: Collection[str] = (),
    queued: bool = False,
) -> None:
    """Raise `FailedPrecondition` of kind "devices_missing" for a job whose launched servers find
    too few free devices on a rollout worker; it says what there is, and which jobs hold it.

    `leaving`: jobs whose devices are free once this one starts: ended ones, and this one itself.
    `queued`: the job starts when another has ended, so that it only needs devices that exist.
    Workers without devices are not checked, since their servers choose devices themselves.
    """
    wanted = devices_of_engines(spec)
    needed = sum(wanted.values())
    if not needed:
        return
    for worker in workers:
        devices = worker.beat.devices
        holders = [set() if queued else jobs_on(one) - set(leaving) for one in devices]
        free = sum(not one for one in holders)
        if not devices or needed <= free:
            continue
        kinds = Counter(one.device_class for one in devices)
        there = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
        jobs = Counter(itertools.chain(*holders))
        held = ", ".join(f"{name} ({count})" for name, count in sorted(jobs.items()))
        most = max(wanted, key=lambda name: (wanted[name], name))
        raise FailedPrecondition(
            f"the job's servers need {needed} devices of each rollout worker (replicas x "
            f"tensor_parallel: {', '.join(f'{k} {v}' for k, v in sorted(wanted.items()))}); "
            f"{worker} has {there}, of which {free} are free" + (held and f"; held by {held}"),
            kind="devices_missing",
            field=f"policies.{most}.engine.replicas",
            value=needed,
            remedy="Ask for fewer replicas or devices"
            + (", wait for or cancel the jobs that hold them" if held else "")
            + ", or start nodes with more devices for engines (--engine-devices).",
        )
