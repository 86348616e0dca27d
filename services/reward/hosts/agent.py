"""The process of an attached host: offers itself to the reward service and runs its calls."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import grpc
import structlog

from services.chassis.telemetry import Telemetry
from services.reward.call import CallDeadline, CallOutcome, FunctionCall
from services.reward.cgroups import CoreLease
from services.reward.executor import CallExecutor
from services.reward.function import RegisteredFunction
from services.reward.host import FunctionHost, LocalHost
from services.reward.sandboxes.profile import BUBBLEWRAP, PROCESS, find_bubblewrap
from services.reward.settings import RewardSettings
from troupe.functions.sources import SourceStore
from troupe.rpc import NO_RETRY, RetryPolicy, TroupeError, Unavailable, connect
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1 import reward_pb2_grpc as reward_grpc

log = structlog.get_logger("troupe.reward")

_BACKOFF: Final = RetryPolicy(initial_backoff=0.1, max_backoff=5.0)
_END_SECONDS: Final = 10.0
_REAP_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.1


@dataclass(eq=False)
class _HostRun:
    """A chunk of calls that a worker of this host runs."""

    calls: list[FunctionCall]
    # Ends the call that runs now.
    cancel: Callable[[], None] = field(default=lambda: None)
    cancelled: bool = False


class HostAgent:
    """Attaches `host` to the service at `settings.reward_address`, again after every loss."""

    def __init__(
        self, settings: RewardSettings, host: FunctionHost, offer: reward_pb.HostOffer
    ) -> None:
        self._settings, self._host, self._offer = settings, host, offer
        self._sources = SourceStore()
        self._functions: dict[str, RegisteredFunction] = {}
        self._runs: dict[str, _HostRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._messages: asyncio.Queue[reward_pb.HostMessage] = asyncio.Queue()
        self._beat_seconds = 1.0
        self._draining = False
        self._loops: list[asyncio.Task[None]] = []
        self.attached = asyncio.Event()

    async def start(self) -> None:
        """Start the workers that the host always has, and begin to attach."""
        await self._host.start()
        self._loops = [
            asyncio.create_task(self._stay_attached(), name="attachment"),
            asyncio.create_task(self._reap(), name="reaper"),
        ]

    async def leave(self) -> None:
        """Take no more calls; running calls continue."""
        self._draining = True
        self._beat()

    async def stop(self, grace: float) -> None:
        """Wait up to `grace` seconds for running calls, then end them and everything else."""
        if self._tasks and self.attached.is_set():
            await asyncio.wait(self._tasks, timeout=grace)
            # Outcomes are still being sent.
            await asyncio.sleep(min(grace, 0.1))
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self._end_runs()
        await self._host.stop()
        self._sources.close()

    async def _stay_attached(self) -> None:
        jitter = random.Random()
        attempt = 0
        while True:
            error: TroupeError
            try:
                await self._attach()
                error = Unavailable("the reward service ended the stream")
            except TroupeError as raised:
                error = raised
            except Exception as raised:  # a command that cannot be handled: attach again
                log.exception("attached no more", service=self._settings.reward_address)
                error = Unavailable(f"{type(raised).__name__}: {raised}")
            if self.attached.is_set():
                attempt = 0
            self.attached.clear()
            # The service has given up what runs here, and has it run elsewhere.
            await self._end_runs()
            attempt += 1
            if attempt & (attempt - 1) == 0:
                address = self._settings.reward_address
                log.warning("not attached", service=address, why=str(error), attempt=attempt)
            await asyncio.sleep(_BACKOFF.backoff(min(attempt, 10), error, jitter))

    async def _attach(self) -> None:
        """Serve one stream, from the offer to its end."""
        self._messages = asyncio.Queue()
        self._messages.put_nowait(reward_pb.HostMessage(offer=self._offer))
        settings = self._settings
        async with connect(settings.reward_address, settings.client(retry=NO_RETRY)) as channel:
            stub: reward_grpc.RewardAsyncStub = reward_grpc.RewardStub(channel)
            beating = asyncio.create_task(self._keep_beating())
            stream = stub.AttachHost(self._outgoing())
            try:
                async for command in stream:
                    self._handle(command)
            finally:
                beating.cancel()
                stream.cancel()

    async def _outgoing(self) -> AsyncIterator[reward_pb.HostMessage]:
        messages = self._messages
        while True:
            yield await messages.get()

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            self._beat()

    def _beat(self) -> None:
        beat = reward_pb.HostBeat(draining=self._draining, processes=self._host.alive)
        for name, first in self._host.residents.items():
            beat.residents.add(name=name, first_device=first)
        self._messages.put_nowait(reward_pb.HostMessage(beat=beat))

    def _handle(self, command: reward_pb.HostCommand) -> None:
        what = command.WhichOneof("command")
        if what == "welcome":
            self._beat_seconds = command.welcome.beat_seconds or self._beat_seconds
            self.attached.set()
            log.info("attached", service=self._settings.reward_address)
            self._beat()
        elif what == "run":
            self._begin(command.run)
        elif what == "cancel" and (run := self._runs.get(command.cancel.run_id)):
            run.cancelled = True
            run.cancel()
        elif what == "drop" and (run := self._runs.get(command.drop.run_id)):
            run.calls[command.drop.index].dropped = True
        elif what == "source":
            self._sources.put(command.source.files)

    def _begin(self, request: reward_pb.HostRun) -> None:
        # The service minds how long the caller waits; here only the run time is bounded.
        deadline = CallDeadline(request.function.timeout_seconds)
        run = _HostRun(
            [
                FunctionCall(
                    call.arguments_json,
                    call.job_id,
                    call.trajectory_id,
                    printed=partial(_print, self._messages, request.run_id, index),
                    deadline=deadline,
                )
                for index, call in enumerate(request.calls)
            ]
        )
        self._runs[request.run_id] = run
        task = asyncio.create_task(self._run(request, run, self._messages))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self,
        request: reward_pb.HostRun,
        run: _HostRun,
        messages: asyncio.Queue[reward_pb.HostMessage],
    ) -> None:
        """Run the calls and send their outcomes to `messages`, of the stream that they came by."""
        try:
            function = self._function(request)
            executor, lease = await self._take(function, request.cores)
            run.cancel = partial(self._host.cancel, executor)
            try:
                running = self._host.run_many(executor, function, run.calls, lease)
                async with aclosing(running) as outcomes:
                    if run.cancelled:
                        run.cancel()
                    async for index, outcome in outcomes:
                        messages.put_nowait(_answer(request.run_id, index, outcome))
            finally:
                self._host.give_back(executor, lease)
        except Exception as error:
            log.exception("run", function=request.function.name)
            message = f"the host failed: {type(error).__name__}: {error}"
            failed = CallOutcome.failed(reward_pb.InvocationError.KIND_WORKER_DIED, message)
            messages.put_nowait(_answer(request.run_id, 0, failed))
        finally:
            self._runs.pop(request.run_id, None)
            messages.put_nowait(
                reward_pb.HostMessage(end=reward_pb.HostRunEnd(run_id=request.run_id))
            )

    async def _take(
        self, function: RegisteredFunction, cores: int
    ) -> tuple[CallExecutor, CoreLease | None]:
        """Return an executor and cores, once there is room on devices for the model. The service
        saw both free, but its report of models on devices may have been outdated."""
        placement = self._host.resources.placement
        async with asyncio.timeout(function.spec.timeout_seconds):
            while True:
                if placement is not None and function.spec.model_service:
                    placement.room([function.spec.model_service])
                try:
                    return self._host.take(function, cores)
                except ValueError as error:
                    log.info("no room on devices yet", why=str(error))
                    await asyncio.sleep(_LOOK_SECONDS)

    def _function(self, request: reward_pb.HostRun) -> RegisteredFunction:
        """Return the function as the service knows it now. Raises `NotFound` without its source."""
        spec = request.function
        key = f"{spec.name}@{spec.version}"
        known = self._functions.get(key)
        if known is None or known.spec != spec:
            kept = reward_pb.FunctionSpec()
            kept.CopyFrom(spec)
            source = self._sources.find(spec.source_sha256) if spec.source_sha256 else None
            known = self._functions[key] = RegisteredFunction(kept, source)
        known.registrations = request.registrations
        return known

    async def _end_runs(self) -> None:
        """Kill what runs: its outcomes are not wanted any more."""
        for run in self._runs.values():
            for call in run.calls:
                call.dropped = True
            run.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_END_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(_REAP_SECONDS)
            self._host.reap()


def _print(
    messages: asyncio.Queue[reward_pb.HostMessage], run_id: str, index: int, part: bytes
) -> None:
    output = reward_pb.HostOutput(run_id=run_id, index=index, text=part)
    messages.put_nowait(reward_pb.HostMessage(output=output))


def _answer(run_id: str, index: int, outcome: CallOutcome) -> reward_pb.HostMessage:
    answer = reward_pb.HostOutcome(
        run_id=run_id,
        index=index,
        seconds=outcome.seconds,
        cold_start_seconds=outcome.cold_seconds,
    )
    if outcome.error is None:
        answer.result_json = outcome.result_json
    else:
        answer.error.CopyFrom(outcome.error)
    return reward_pb.HostMessage(outcome=answer)


class RewardHost(HostAgent):
    """Runs calls for the reward service at TROUPE_REWARD_ADDRESS."""

    name = "troupe.v1.RewardHost"

    def __init__(self, settings: RewardSettings, telemetry: Telemetry) -> None:
        self._local = LocalHost(settings, telemetry)
        host = self._local.host
        super().__init__(settings, host, offer_of(settings))
        busy = telemetry.gauge("troupe_reward_host_busy", "Workers that run calls here.")
        busy.set_function(lambda: host.workers - host.free)
        attached = telemetry.gauge("troupe_reward_host_attached", "1: it takes calls.")
        attached.set_function(lambda: float(self.attached.is_set()))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Nothing to register: the host calls the service."""

    async def stop(self, grace: float) -> None:
        """Let calls end for up to `grace` seconds, then kill them."""
        await super().stop(grace)
        self._local.close()


def offer_of(settings: RewardSettings) -> reward_pb.HostOffer:
    """Return the resources of this process, as it offers them."""
    sandboxes = [PROCESS]
    with contextlib.suppress(TroupeError):
        find_bubblewrap()
        sandboxes.append(BUBBLEWRAP)
    return reward_pb.HostOffer(
        host_id=settings.worker_id,
        workers=settings.reward_workers,
        cores=settings.reward_cores,
        memory_mib=settings.reward_memory_mib,
        sandboxes=sandboxes,
        gpus=settings.reward_gpus,
        models=[
            reward_pb.ModelOffer(name=name, gpus=model.gpus, concurrency=model.concurrency)
            for name, model in settings.reward_models.items()
        ],
    )
