"""The reward service as rollout uses it: tools during a trajectory, rewards at its end."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import structlog

from services.rollout.trajectories.clock import TrajectoryClock
from troupe import __version__
from troupe.functions.costs import schema_of, to_spec
from troupe.functions.declaration import definition
from troupe.functions.describing import IMPORT_SECONDS, Described
from troupe.job import FunctionSpec, JobSpec
from troupe.outcomes import NotJsonError, parse_json
from troupe.rpc import RetryPolicy
from troupe.rpc.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    TroupeError,
    Unavailable,
)
from troupe.rpc.ids import new_id
from troupe.v1 import reward_pb2 as pb
from troupe.workflow import ToolError, scoring

if TYPE_CHECKING:
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub

# How long a call waits for others. A message on its way costs about half a millisecond of both
# sides' time, so this much more is not noticed.
_WAIT_SECONDS: Final = 0.002
_MOST: Final = 256
_MOST_BYTES: Final = 4 * 2**20
# Calls of functions that take longer than this go alone.
_SHORT_SECONDS: Final = 0.05
# What one more run says of how long they take.
_SHARE: Final = 0.1

_Key = tuple[str, str, str, int, float]


@dataclass(eq=False)
class _Batch:
    """Calls of one function that wait to be sent."""

    timer: asyncio.TimerHandle
    calls: list[tuple[pb.InvokeRequest, float, asyncio.Future[pb.InvokeResponse]]] = field(
        default_factory=list
    )
    size: int = 0


class Coalescer:
    """`Invoke` as callers know it, through `InvokeBatch` where that pays."""

    def __init__(self, stub: RewardAsyncStub) -> None:
        self._stub = stub
        self._batches: dict[_Key, _Batch] = {}
        # How long calls of a function take, by its key.
        self._seconds: dict[_Key, float] = {}
        self._sent: set[asyncio.Task[None]] = set()

    async def invoke(self, request: pb.InvokeRequest, timeout: float) -> pb.InvokeResponse:
        """The response within `timeout` seconds. Raises `TroupeError`, as `Invoke` does."""
        key = (request.name, request.version, request.job_id, request.priority, request.weight)
        if self._seconds.get(key, _SHORT_SECONDS) >= _SHORT_SECONDS:
            response = await self._stub.Invoke(request, timeout=timeout)
            self._learn(key, response)
            return response
        answer: asyncio.Future[pb.InvokeResponse] = asyncio.get_running_loop().create_future()
        batch = self._batches.get(key)
        if batch is None:
            timer = asyncio.get_running_loop().call_later(_WAIT_SECONDS, self._send, key)
            batch = self._batches[key] = _Batch(timer)
        batch.calls.append((request, timeout, answer))
        batch.size += len(request.arguments_json)
        if len(batch.calls) >= _MOST or batch.size >= _MOST_BYTES:
            self._send(key)
        response = await answer
        if response.error.kind == pb.InvocationError.KIND_BAD_ARGUMENTS:
            raise InvalidArgument(response.error.message, field="arguments_json")
        return response

    def _send(self, key: _Key) -> None:
        batch = self._batches.pop(key)
        batch.timer.cancel()
        task = asyncio.create_task(self._answer(key, batch))
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)

    async def _answer(self, key: _Key, batch: _Batch) -> None:
        # Those who have left meanwhile want nothing any more.
        calls = [call for call in batch.calls if not call[2].done()]
        if not calls:
            return
        name, version, job_id, priority, weight = key
        request = pb.InvokeBatchRequest(
            name=name,
            version=version,
            job_id=job_id,
            priority=priority,
            weight=weight,
            calls=[
                pb.BatchCall(
                    invocation_id=one.invocation_id,
                    arguments_json=one.arguments_json,
                    trajectory_id=one.trajectory_id,
                    waiters=one.waiters,
                    expected_seconds=one.expected_seconds,
                    query_id=one.query_id,
                )
                for one, _, _ in calls
            ],
        )
        try:
            timeout = max(timeout for _, timeout, _ in calls)
            reply = await self._stub.InvokeBatch(request, timeout=timeout)
        except InvalidArgument:
            # One of them, or their number: each hears of its own fault.
            await asyncio.gather(*(self._answer_alone(*call) for call in calls))
            return
        except Exception as error:
            for _, _, answer in calls:
                if not answer.done():
                    answer.set_exception(error)
            return
        crowded_out = []
        for call, response in zip(calls, reply.responses, strict=True):
            if response.error.kind == pb.InvocationError.KIND_RESULT_TOO_LARGE:
                crowded_out.append(call)
                continue
            self._learn(key, response)
            if not call[2].done():
                call[2].set_result(response)
        # The service keeps what its answer had no room for; one after another, for they are large.
        for call in crowded_out:
            await self._answer_alone(*call)

    async def _answer_alone(
        self,
        request: pb.InvokeRequest,
        timeout: float,
        answer: asyncio.Future[pb.InvokeResponse],
    ) -> None:
        try:
            response = await self._stub.Invoke(request, timeout=timeout)
        except Exception as error:
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(response)

    def _learn(self, key: _Key, response: pb.InvokeResponse) -> None:
        seconds = response.run_seconds - response.cold_start_seconds
        known = self._seconds.get(key, seconds)
        self._seconds[key] = known + _SHARE * (seconds - known)


log = structlog.get_logger(__name__)

_NAME: Final = "troupe/describe"
_ENTRYPOINT: Final = "troupe.functions.describing:describe"
# Nothing of a job begins before; it is short beside what waits.
_PRIORITY: Final = 1_000_000
# Of the service, between that it is told of a function and that it is asked for it.
_RESTARTS: Final = 4


async def register_describer(stub: RewardAsyncStub) -> None:
    """Make the function known that describes others. Raises `TroupeError`."""
    costs = {"cores": 0, "memory_mib": 0, "timeout_seconds": IMPORT_SECONDS + 10}
    spec = to_spec(_NAME, __version__, _ENTRYPOINT, costs)
    await stub.RegisterFunction(
        pb.RegisterFunctionRequest(request_id=new_id("register"), function=spec)
    )


async def describe(stub: RewardAsyncStub, entrypoints: Collection[str]) -> dict[str, Described]:
    """What they declare, by entrypoint; of one that cannot be described, nothing: its first call
    says why. Raises `TroupeError` when the service cannot be asked."""
    for left in reversed(range(_RESTARTS + 1)):
        await register_describer(stub)
        try:
            found = await asyncio.gather(*(_describe(stub, one) for one in entrypoints))
        except NotFound as error:
            # A service that was restarted since has forgotten it.
            if error.kind != "function_not_found" or not left:
                raise
            log.info("the reward service forgot its functions", error=error.message)
            continue
        return dict(zip(entrypoints, found, strict=True))
    raise AssertionError("the last round returns or raises")


async def list_described(stub: RewardAsyncStub) -> dict[tuple[str, str], Described]:
    """What is known of the functions of the service, by name and version. Raises `TroupeError`."""
    reply = await stub.ListFunctions(pb.ListFunctionsRequest())
    return {
        (spec.name, spec.version): Described(
            spec.entrypoint,
            spec.kind,
            spec.name,
            spec.version,
            spec.description,
            parameters=schema_of(spec),
        )
        for spec in (status.function for status in reply.functions)
    }


async def _describe(stub: RewardAsyncStub, entrypoint: str) -> Described:
    response = await stub.Invoke(
        pb.InvokeRequest(
            invocation_id=new_id("describe"),
            name=_NAME,
            version=__version__,
            arguments_json=json.dumps({"entrypoint": entrypoint}),
            priority=_PRIORITY,
        ),
        timeout=2 * IMPORT_SECONDS,
    )
    if response.HasField("error"):
        log.info(
            "a function could not be described",
            entrypoint=entrypoint,
            error=response.error.message,
        )
        return Described(entrypoint)
    try:
        return Described(**parse_json(response.result_json))
    except (NotJsonError, TypeError) as error:  # of an imported module that answers for us
        log.warning("a function is described as nothing", entrypoint=entrypoint, error=str(error))
        return Described(entrypoint)


_CANCEL_SECONDS = 2.0
_CLOSE_SECONDS = 30.0
_ANNOUNCE_SECONDS = 2.0
_DESCRIBE_SECONDS = IMPORT_SECONDS + 30.0
# Looks for a deployed function that the service does not know (any more): some ten seconds.
_FORGOTTEN = 8
# A reward function whose worker process dies this often kills it by itself; and a call that the
# service fails this often does not only fail because its connection was cut.
LIVES = 3
_BACKOFF = RetryPolicy()
_REMEDIES = {
    pb.InvocationError.KIND_NOT_IMPORTABLE: "Make it importable where the reward service runs: "
    "the directory that holds it on PYTHONPATH, the function at the module's top level.",
    pb.InvocationError.KIND_TIMEOUT: "Raise its `timeout_seconds`, or make it faster.",
    pb.InvocationError.KIND_OUT_OF_MEMORY: "Raise its `memory_mib`, or let it take less.",
    pb.InvocationError.KIND_SANDBOX_GONE: "Begin anew: its next call has a new sandbox. Raise "
    "`sandbox_idle_seconds` if it was idle for too long.",
    pb.InvocationError.KIND_QUOTA_EXHAUSTED: "Declare a larger quota in TROUPE_REWARD_QUOTAS if "
    "the interface allows it, or call it less often.",
    pb.InvocationError.KIND_MODEL_UNAVAILABLE: "Look at the log of the reward host that has the "
    "model (TROUPE_REWARD_MODELS).",
    pb.InvocationError.KIND_BAD_RESULT: "Return finite numbers, strings, lists and dicts of them.",
}


@dataclass
class TrajectorySandboxes:
    """What the stateful functions of one trajectory keep at the reward service."""

    ids: set[str] = field(default_factory=set)
    # A call may have opened one, and nobody heard of it again.
    unheard: bool = False

    async def hear(self, answer: Awaitable[pb.InvokeResponse]) -> pb.InvokeResponse:
        """The answer, and what it says of a sandbox."""
        try:
            response = await answer
        except BaseException:
            self.unheard = True
            raise
        if response.error.kind == pb.InvocationError.KIND_SANDBOX_GONE:
            self.ids.discard(response.sandbox)
        elif response.sandbox:
            self.ids.add(response.sandbox)
        return response


class JobFunctions:
    """Tools and rewards of one job, by name. Registered anew whenever the service forgot them."""

    def __init__(self, stub: RewardAsyncStub, job_id: str, spec: JobSpec) -> None:
        self._stub = stub
        self._coalescer = Coalescer(stub)
        self._job_id = job_id
        # A tool and a reward may have the same name; they are different functions.
        self._functions: dict[str, FunctionSpec] = {
            **{f"tools/{name}": function for name, function in spec.tools.items()},
            **{f"rewards/{name}": function for name, function in spec.rewards.items()},
        }
        self._described: dict[str, Described] = {}
        self._registering: asyncio.Task[None] | None = None
        self._jitter = random.Random()

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The job's tools as OpenAI's API describes tools to models; those that nobody has
        described yet are not among them."""
        return [
            definition(
                name.removeprefix("tools/"),
                described.description,
                described.parameters,
                without=self._functions[name].arguments,
            )
            for name, described in self._described.items()
            if name.startswith("tools/")
        ]

    async def announce(self) -> None:
        """Register early, so that a bad function is known before anything runs.

        A service that is away is told later, by the first call; a job without functions needs
        none. Raises `TroupeError`.
        """
        if not self._functions:
            return
        try:
            async with asyncio.timeout(_ANNOUNCE_SECONDS):
                await register_describer(self._stub)
            async with asyncio.timeout(_DESCRIBE_SECONDS):
                await self.register()
        except (TimeoutError, Unavailable, DeadlineExceeded):
            log.info("the reward service is away", job_id=self._job_id)

    async def register(self) -> None:
        """Make the functions known to the reward service, with what the job says of them and what
        they declare. Raises `TroupeError`."""
        own = {n: f.entrypoint for n, f in self._functions.items() if f.entrypoint is not None}
        missing = sorted({e for name, e in own.items() if name not in self._described})
        if missing:
            described = await describe(self._stub, missing)
            self._described |= {n: described[e] for n, e in own.items() if e in described}
        named = {n: f.deployed for n, f in self._functions.items() if f.function is not None}
        if named.keys() - self._described.keys():
            deployed = await list_described(self._stub)
            self._described |= {n: deployed[key] for n, key in named.items() if key in deployed}
        for name, entrypoint in own.items():
            function, declared = self._functions[name], self._described[name]
            spec = to_spec(
                f"{self._job_id}/{name}",
                self._version(name),
                entrypoint,
                function.costs,
                declared=declared.costs,
                kind="reward" if name.startswith("rewards/") else "tool",
                description=declared.description,
                parameters=declared.parameters,
            )
            await self._stub.RegisterFunction(
                pb.RegisterFunctionRequest(request_id=new_id("register"), function=spec)
            )

    def _version(self, name: str) -> str:
        declared = self._described.get(name)
        return self._functions[name].version or (declared.version if declared else "1")

    def _key(self, name: str) -> tuple[str, str]:
        """Name and version that the reward service knows it by."""
        if self._functions[name].function is not None:
            return self._functions[name].deployed
        return f"{self._job_id}/{name}", self._version(name)

    async def call(
        self,
        name: str,
        arguments_json: str,
        *,
        trajectory_id: str,
        timeout: float,
        had: TrajectorySandboxes,
        waiters: int = 1,
        query_id: str = "",
        expected_seconds: float = 0.0,
    ) -> str:
        """Result of `tools/...` or `rewards/...` as JSON, within `timeout` seconds; `had` is kept
        up to date with the sandboxes that the trajectory has; `waiters` trajectories wait for it.
        `expected_seconds`: how long its workflow thinks that it takes; 0: it did not say.

        A reward service that is away, restarts, or dies during the call costs time only: the call
        is repeated until it is answered. Raises `ToolError`. Cancelling the task cancels the
        invocation.
        """
        request = pb.InvokeRequest(
            arguments_json=self._with_own(name, arguments_json),
            job_id=self._job_id,
            trajectory_id=trajectory_id,
            sandboxes=sorted(had.ids),
            waiters=waiters,
            query_id=query_id,
            expected_seconds=expected_seconds,
        )
        try:
            async with asyncio.timeout(timeout):
                response = await had.hear(self._until_answered(name, request, timeout))
        except (TimeoutError, DeadlineExceeded) as error:
            self._cancel_later(request.invocation_id)
            raise ToolError(
                f"{name} gave no result within {timeout:.1f} s, queueing included",
                kind="deadline",
                field=name.replace("/", "."),
                remedy="Raise limits.trajectory_seconds, or give the reward service more workers.",
            ) from error
        except asyncio.CancelledError:
            self._cancel_later(request.invocation_id)
            raise
        except TroupeError as error:
            raise ToolError(
                f"{name}: {error.message}",
                kind=error.kind,
                field=name.replace("/", "."),
                remedy=error.remedy,
            ) from error
        if response.HasField("error"):
            kind = pb.InvocationError.Kind.Name(response.error.kind)
            function = self._functions[name]
            raise ToolError(
                f"{name}: {response.error.message}",
                kind=kind.removeprefix("KIND_").lower(),
                field=name.replace("/", "."),
                value=function.entrypoint or function.function,
                remedy=_REMEDIES.get(response.error.kind),
                traceback=response.error.traceback,
            )
        return response.result_json

    async def _until_answered(
        self, name: str, request: pb.InvokeRequest, timeout: float
    ) -> pb.InvokeResponse:
        """The answer of the function itself, good or bad."""
        # Reward functions are declared stateless. A tool whose worker died may have done its deed.
        lives = LIVES if name.startswith("rewards/") else 1
        forgotten = 0
        for attempt in itertools.count(1):
            # The service may remember how a former invocation ended: as broken as we saw it.
            request.invocation_id = new_id("invoke")
            request.name, request.version = self._key(name)
            try:
                response = await self._invoke(name, request, timeout)
            except NotFound as error:
                if self._functions[name].function is not None:
                    # The orchestrator brings deployed functions back after a restart.
                    forgotten += 1
                    if forgotten > _FORGOTTEN:
                        raise
                    await asyncio.sleep(_BACKOFF.backoff(forgotten, error, self._jitter))
                    continue
                await self._register_anew()
                continue
            except (Unavailable, Internal) as error:
                lives -= isinstance(error, Internal)
                if lives == 0:
                    raise
                log.info("an invocation broke", name=name, attempt=attempt, error=str(error))
                await asyncio.sleep(_BACKOFF.backoff(attempt, error, self._jitter))
                continue
            kind = response.error.kind if response.HasField("error") else None
            if kind == pb.InvocationError.KIND_WORKER_DIED:
                lives -= 1
                if lives > 0:
                    continue
            # Cancelled by whoever stopped the service or lost our connection: we have not.
            if kind != pb.InvocationError.KIND_CANCELLED:
                return response
        raise AssertionError("the count has no end")

    def _with_own(self, name: str, arguments_json: str) -> str:
        """The arguments with those that the job gives to every call."""
        own = self._functions[name].arguments
        return json.dumps({**json.loads(arguments_json), **own}) if own else arguments_json

    async def _invoke(
        self, name: str, request: pb.InvokeRequest, timeout: float
    ) -> pb.InvokeResponse:
        if name.startswith("rewards/"):
            return await self._coalescer.invoke(request, timeout)
        return await self._stub.Invoke(request, timeout=timeout)

    async def _register_anew(self) -> None:
        """The service was restarted. Of all the calls that notice, one registers."""
        if self._registering is None or self._registering.done():
            log.info("the reward service forgot the functions", job_id=self._job_id)
            self._registering = asyncio.create_task(self.register())
        try:
            await asyncio.shield(self._registering)
        except Unavailable as broken:  # it was restarted again
            await asyncio.sleep(_BACKOFF.backoff(1, broken, self._jitter))

    def close_later(self, trajectory_id: str) -> None:
        """End the sandboxes of a trajectory that has ended."""
        task = asyncio.create_task(self._close(trajectory_id))
        _background.add(task)
        task.add_done_callback(_background.discard)

    async def _close(self, trajectory_id: str) -> None:
        request = pb.CloseTrajectoryRequest(
            request_id=new_id("close"), job_id=self._job_id, trajectory_id=trajectory_id
        )
        try:
            await self._stub.CloseTrajectory(request, timeout=_CLOSE_SECONDS)
        except Exception as error:  # also a channel that is closed already
            # It ends when it was idle for long enough, then.
            log.debug("a trajectory was not closed", error=str(error))

    def _cancel_later(self, invocation_id: str) -> None:
        task = asyncio.create_task(self._cancel(invocation_id))
        _background.add(task)
        task.add_done_callback(_background.discard)

    async def _cancel(self, invocation_id: str) -> None:
        try:
            await self._stub.CancelInvocation(
                pb.CancelInvocationRequest(invocation_id=invocation_id), timeout=_CANCEL_SECONDS
            )
        except Exception as error:  # also a channel that is closed already
            # It ends at its own timeout, then.
            log.debug("an invocation was not cancelled", error=str(error))


# The event loop keeps only weak references to tasks.
_background: set[asyncio.Task[None]] = set()


class TrajectoryTools:
    """`troupe.workflow.ToolBackend` of one trajectory."""

    def __init__(
        self,
        functions: JobFunctions,
        trajectory_id: str,
        clock: TrajectoryClock,
        waiters: Callable[[], int] = lambda: 1,
        query_id: str = "",
    ) -> None:
        """`waiters`: how many trajectories wait for what this one does, whenever it is asked."""
        self._functions = functions
        self._waiters = waiters
        self._trajectory_id = trajectory_id
        self._clock = clock
        self._query_id = query_id
        self._had = TrajectorySandboxes()

    def close(self) -> None:
        """The trajectory has ended: what its stateful functions kept goes."""
        if self._had.ids or self._had.unheard:
            self._functions.close_later(self._trajectory_id)

    async def invoke(self, name: str, arguments_json: str, *, expected_seconds: float = 0.0) -> str:
        """Call a tool. Raises `ToolError`."""
        return await self._call(f"tools/{name}", arguments_json, expected_seconds)

    async def score(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a reward function; its JSON value. Raises `ToolError`."""
        answer = await self._call(f"rewards/{name}", scoring.as_arguments(arguments))
        try:
            return parse_json(answer)
        except NotJsonError as error:
            raise ToolError(
                f"rewards/{name} answered what is no JSON: {error}",
                kind="bad_result",
                field=f"rewards.{name}",
            ) from error

    async def _call(self, name: str, arguments_json: str, expected_seconds: float = 0.0) -> str:
        left = self._clock.bound(math.inf)
        with self._clock.elsewhere():
            return await self._functions.call(
                name,
                arguments_json,
                trajectory_id=self._trajectory_id,
                timeout=max(left, 0.001),
                had=self._had,
                waiters=self._waiters(),
                query_id=self._query_id,
                expected_seconds=expected_seconds,
            )
