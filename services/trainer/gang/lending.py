"""The devices of a trainer worker while they run ranks of a gang that another worker leads.

The leader's call holds the ranks (`MemberRanks` in gang.py): they end with it, so a lost leader
leaves none behind, and the call ends with them, so the leader notices immediately. A worker runs
ranks of one gang at a time: the one that the orchestrator formed last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import structlog

from services.trainer.gang.gang import GRACE_SECONDS, RankSettings, launch
from services.trainer.settings import TrainerSettings
from troupe.contracts import kinds
from troupe.functions.validation import MAX_SECONDS, is_seconds
from troupe.processes.ending import stop_process
from troupe.rpc import Aborted, InvalidArgument
from troupe.rpc.addresses import split_address
from troupe.v1 import trainer_pb2 as trainer_pb

log = structlog.get_logger("troupe.gang")

_POLL_SECONDS = 0.1


class LentDevices:
    """The runner of ranks of other workers' gangs, one gang at a time."""

    def __init__(self, settings: TrainerSettings, most: int) -> None:
        """Create the runner. `most`: number of ranks for which this worker has devices."""
        self._settings, self._most = settings, most
        self._request: trainer_pb.HostRanksRequest | None = None
        # Held while ranks run, until the last one has ended.
        self._running = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def request(self) -> trainer_pb.HostRanksRequest | None:
        """The call that has the devices; None: they are this worker's."""
        return self._request

    async def take_back(self) -> None:
        """End ranks that run here, because a policy is bound to this worker.

        The orchestrator, which alone decides, has given up their gang; its leader may not know.
        """
        if self._request is not None:
            log.warning("devices are taken back", leader=self._request.leader)
        await self.close()

    async def host(
        self, request: trainer_pb.HostRanksRequest
    ) -> AsyncIterator[trainer_pb.HostRanksEvent]:
        """Run ranks until the caller leaves; one event when they were started.

        Ranks of a gang that was formed earlier are ended first. Raises Aborted of kind "gang_lost"
        when the ranks have ended, "devices_lent" for a gang older than the one that has the
        devices, InvalidArgument.
        """
        host, port = self._checked(request)
        if (other := self._request) is not None and other.formed > request.formed:
            raise Aborted(
                f"the devices of this worker run ranks of {other.policy} (job {other.job_id}) for "
                f"{other.leader}, whose gang was formed later",
                kind="devices_lent",
                remedy="Bind the policy again: its workers have changed.",
            )
        # From here on, earlier ranks end.
        self._request = request
        started = asyncio.Event()
        task = asyncio.create_task(self._run(request, host, port, started))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Marks the exception as retrieved, in case the caller has left.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        begun = asyncio.create_task(started.wait())
        try:
            await asyncio.wait({task, begun}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                yield trainer_pb.HostRanksEvent()
            await asyncio.shield(task)
        finally:
            begun.cancel()
            if self._request is request:
                self._request = None  # `_run` ends the ranks

    async def close(self) -> None:
        """End all ranks."""
        self._request = None
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=3 * GRACE_SECONDS)

    def _checked(self, request: trainer_pb.HostRanksRequest) -> tuple[str, int]:
        """Host and port of the endpoint of a request that can be carried out."""
        host, port = split_address(request.endpoint)
        if not (host and port.isdecimal()):
            raise InvalidArgument("is not host:port", field="endpoint", value=request.endpoint)
        if not 0 < request.ranks <= self._most:
            raise InvalidArgument(
                f"this worker runs 1 to {self._most} ranks",
                field="ranks",
                value=request.ranks,
                remedy="Ask for as many as its heartbeat says (TROUPE_GANG_RANKS).",
            )
        if not 0 < request.node < request.nodes:
            raise InvalidArgument(
                f"is not one of the members of {request.nodes} workers",
                field="node",
                value=request.node,
            )
        for field in ("start_seconds", "timeout_seconds"):
            if not is_seconds(seconds := getattr(request, field)) or not seconds:
                message = f"is not a positive number of at most {MAX_SECONDS:,}"
                raise InvalidArgument(message, field=field, value=seconds)
        return host, int(port)

    async def _run(
        self, request: trainer_pb.HostRanksRequest, host: str, port: int, started: asyncio.Event
    ) -> None:
        terms = RankSettings.of(self._settings, request.ranks, "").timed(
            request.start_seconds, request.timeout_seconds
        )
        async with self._running:
            if self._request is not request:
                raise self._ended(request, "its devices were given to another gang")
            log.info("lends devices", leader=request.leader, ranks=request.ranks)
            # Started from this long-lived thread: the kernel ends them with the thread that started
            # them.
            agent = launch(
                terms,
                ranks=request.ranks,
                nodes=request.nodes,
                node=request.node,
                address=host,
                port=port,
            )
            try:
                started.set()
                while agent.poll() is None and self._request is request:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_SECONDS)
                status = agent.poll()
            finally:
                await asyncio.to_thread(stop_process, agent, GRACE_SECONDS)
                log.info("devices are back", leader=request.leader, status=agent.returncode)
        raise self._ended(request, "given up" if status is None else f"exit status {status}")

    def _ended(self, request: trainer_pb.HostRanksRequest, why: str) -> Aborted:
        return Aborted(
            f"{request.ranks} ranks on {self._settings.worker_id} have ended: {why}",
            kind=kinds.GANG_LOST,
            remedy="See this worker's log for the rank that ended and the reason.",
        )
