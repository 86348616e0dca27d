"""Rollout's client of the reward service: tools during a trajectory, reward functions at its
end."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import structlog

from services.rollout.trajectories.clock import TrajectoryClock
from troupe import __version__
from troupe.contracts import kinds
from troupe.functions.costs import schema_of, to_spec
from troupe.functions.declaration import definition
from troupe.functions.describing import IMPORT_SECONDS, Described
from troupe.functions.sources import SourceStore
from troupe.job import FunctionSpec, JobSpec
from troupe.outcomes import NotJsonError, parse_json
from troupe.rpc import Attempts, RetryPolicy
from troupe.rpc.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    TroupeError,
    Unavailable,
)
from troupe.rpc.ids import new_id
from troupe.scheduling.precedence import share_of
from troupe.v1 import reward_pb2 as reward_pb
from troupe.workflow import ToolError, scoring
from troupe.workflow.tools import result_of

if TYPE_CHECKING:
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub

log = structlog.get_logger(__name__)

_CANCEL_SECONDS: Final = 2.0
_CLOSE_SECONDS: Final = 30.0
_ANNOUNCE_SECONDS = 2.0
_DESCRIBE_SECONDS: Final = IMPORT_SECONDS + 30.0

# The function of the reward service that describes functions, and its priority: no job can begin
# before its answer, and its calls are short.
_NAME: Final = "troupe/describe"
_ENTRYPOINT: Final = "troupe.functions.describing:describe"
_PRIORITY: Final = 1_000_000

# Error kinds of a service that cannot be reached now.
_AWAY: Final = frozenset({kinds.DEADLINE, Unavailable.default_kind})
# Restarts of the service between a registration and the call that needs it.
_DESCRIBE_AGAIN: Final = RetryPolicy(max_attempts=5, initial_backoff=0.0)
# Unanswered calls of a function: repeated as long as the caller's time allows.
_CALL_AGAIN: Final = RetryPolicy(max_attempts=None)
# Calls of a deployed function that the service does not know (any more): repeated for some ten
# seconds.
_DEPLOYED_AGAIN: Final = RetryPolicy(max_attempts=9)
# After this number of deaths of a worker process, the reward function itself is assumed to be the
# cause; and after this number of internal errors, a lost connection is no longer assumed.
LIVES: Final = 3

# How long a call waits for others. A message costs about half a millisecond on both sides, so this
# delay is negligible.
_BATCH_SECONDS: Final = 0.002
_BATCH_CALLS: Final = 256
_BATCH_BYTES: Final = 4 * 2**20
# The event loop keeps only weak references to tasks.
_background: set[asyncio.Task[None]] = set()
# Functions that take longer than this are not batched.
_SHORT_SECONDS: Final = 0.05
# Weight of the newest run in the average duration of a function.
_NEWEST_WEIGHT: Final = 0.1

_Key = tuple[str, str, str, int, float]

_REMEDIES: Final = {
    reward_pb.InvocationError.KIND_NOT_IMPORTABLE: (
        "Make it importable where the reward service runs: put its directory on "
        "PYTHONPATH, and define the function at the module's top level."
    ),
    reward_pb.InvocationError.KIND_TIMEOUT: "Raise its `timeout_seconds`, or make it faster.",
    reward_pb.InvocationError.KIND_OUT_OF_MEMORY: "Raise its `memory_mib`, or let it take less.",
    reward_pb.InvocationError.KIND_SANDBOX_GONE: (
        "Start again: its next call gets a new sandbox. Raise `sandbox_idle_seconds` if it was "
        "idle "
        "for too long."
    ),
    reward_pb.InvocationError.KIND_QUOTA_EXHAUSTED: (
        "Declare a larger quota in TROUPE_REWARD_QUOTAS if the interface allows it, or call it "
        "less often."
    ),
    reward_pb.InvocationError.KIND_MODEL_UNAVAILABLE: (
        "See the log of the reward host that has the model (TROUPE_REWARD_MODELS)."
    ),
    reward_pb.InvocationError.KIND_BAD_RESULT: (
        "Return finite numbers, strings, lists and dicts of them."
    ),
}


class TrajectoryTools:
    """`troupe.workflow.ToolBackend` of one trajectory."""

    def __init__(
        self,
        functions: JobFunctions,
        trajectory_id: str,
        clock: TrajectoryClock,
        waiters: Callable[[], int],
        query_id: str,
    ) -> None:
        """Serve the tools of one trajectory. `waiters`: returns how many trajectories wait for this
        one now."""
        self._functions = functions
        self._waiters = waiters
        self._trajectory_id = trajectory_id
        self._clock = clock
        self._query_id = query_id
        self._sandboxes = TrajectorySandboxes()

    def close(self) -> None:
        """Release the sandboxes of the trajectory, which has ended."""
        if self._sandboxes.ids or self._sandboxes.uncertain:
            self._functions.close_later(self._trajectory_id)

    async def invoke(self, name: str, arguments_json: str, *, expected_seconds: float = 0.0) -> str:
        """Call a tool. Raises `ToolError`."""
        key, payload = self._functions.addressed(name, arguments_json)
        answer = await self._call(key, payload, expected_seconds)
        return self._functions.answered(name, answer)

    async def score(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a reward function, and return its JSON value. Raises `ToolError`."""
        answer = await self._call(f"rewards/{name}", scoring.as_arguments(arguments))
        return result_of(f"rewards/{name}", answer)

    async def _call(self, name: str, arguments_json: str, expected_seconds: float = 0.0) -> str:
        left = self._clock.bound(math.inf)
        with self._clock.outside():
            return await self._functions.call(
                name,
                arguments_json,
                reward_pb.InvokeRequest(
                    trajectory_id=self._trajectory_id,
                    waiters=self._waiters(),
                    query_id=self._query_id,
                    expected_seconds=expected_seconds,
                ),
                max(left, 0.001),
                self._sandboxes,
            )


@dataclass
class TrajectorySandboxes:
    """The sandboxes of one trajectory's stateful functions at the reward service."""

    ids: set[str] = field(default_factory=set)
    # Whether a call without a known answer may have opened one.
    uncertain: bool = False

    async def record(self, answer: Awaitable[reward_pb.InvokeResponse]) -> reward_pb.InvokeResponse:
        """Await a response and record which sandbox it opened or lost."""
        try:
            response = await answer
        except BaseException:
            self.uncertain = True
            raise
        if response.error.kind == reward_pb.InvocationError.KIND_SANDBOX_GONE:
            self.ids.discard(response.sandbox)
        elif response.sandbox:
            self.ids.add(response.sandbox)
        return response


class JobFunctions:
    """Tools and reward functions of one job, by name, which are registered again when the service
    restarts."""

    def __init__(
        self, stub: RewardAsyncStub, job_id: str, spec: JobSpec, sources: SourceStore
    ) -> None:
        """Read the job's functions. `sources` has the code that the job ships, if any."""
        self._stub = stub
        self._sources = sources
        self._sha256 = (spec.code and spec.code.sha256) or ""
        self._coalescer = Coalescer(stub)
        self._job_id = job_id
        self._weight = share_of(spec.priority)
        # A tool and a reward may have the same name.
        self._functions: dict[str, FunctionSpec] = {
            **{f"tools/{name}": function for name, function in spec.tools.items()},
            **{f"rewards/{name}": function for name, function in spec.rewards.items()},
        }
        # MCP servers, and their listed tools: by name, the server and the tool's name there.
        self._servers = {f"tools/{n}": f.mcp for n, f in spec.tools.items() if f.mcp is not None}
        self._listed: dict[str, list[dict[str, Any]]] = {}
        self._served: dict[str, tuple[str, str]] = {}
        self._listing: asyncio.Task[None] | None = None
        self._described: dict[str, Described] = {}
        self._registering: asyncio.Task[None] | None = None

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The job's tools in the form of OpenAI's API, without tools of unknown declaration."""
        return [
            definition(
                name.removeprefix("tools/"),
                described.description,
                described.parameters,
                without=self._functions[name].arguments,
            )
            for name, described in self._described.items()
            if name.startswith("tools/") and name not in self._servers
        ] + [tool for name in self._servers for tool in self._listed.get(name, ())]

    @property
    def tool_names(self) -> list[str]:
        """Names of the job's tools, including tools of MCP servers."""
        tools = [name for name in self._functions if name.startswith("tools/")]
        own = [name.removeprefix("tools/") for name in tools if name not in self._servers]
        return [*own, *self._served]

    async def list_servers(self) -> None:
        """Ask the MCP servers for their tools, unless they have been asked. Raises `ToolError`."""
        if len(self._listed) == len(self._servers):
            return
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._list_servers())
        await asyncio.shield(self._listing)

    async def _list_servers(self) -> None:
        for name in self._servers.keys() - self._listed.keys():
            request = reward_pb.InvokeRequest(priority=_PRIORITY)
            payload = self._server_call(name, "", {})
            seconds = _DESCRIBE_SECONDS + self._servers[name].start_seconds
            answer = await self.call(name, payload, request, seconds, TrajectorySandboxes())
            self._listed[name] = list(self._offered(name, parse_json(answer)))

    def _offered(self, name: str, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the tools of a server that the workflow may call, in the form shown to models."""
        server, field = self._servers[name], f"{name.replace('/', '.')}.mcp"
        if "error" in answer:
            raise ToolError(
                f"{name}: {answer['message']}",
                kind=answer["error"],
                field=field,
                value=server.url or server.command,
                remedy="Start it by hand where the reward service runs; its output is in "
                "`troupe functions logs`.",
            )
        found = {tool["name"]: tool for tool in answer["tools"]}
        if missing := sorted(set(server.offered or ()) - found.keys()):
            raise ToolError(
                f"{name}: the server has no tool '{missing[0]}'; it has {', '.join(found)}",
                kind=kinds.UNKNOWN_TOOL,
                field=f"{field}.offered",
                value=missing[0],
            )
        for tool in found if server.offered is None else server.offered:
            shown = server.prefix + tool
            if shown in self.tool_names:
                raise ToolError(
                    f"{name}: the job has two tools '{shown}'",
                    kind="duplicate_tool",
                    field=f"{field}.prefix",
                    value=server.prefix,
                    remedy="Give the server a prefix, or leave the tool out by `offered`.",
                )
            self._served[shown] = name, tool
            about = found[tool]
            yield definition(shown, about["description"], about["parameters"])

    def _server_call(self, name: str, tool: str, arguments: Any) -> str:
        server = self._servers[name].model_dump(exclude={"offered", "prefix"})
        return json.dumps({"server": server, "name": tool, "arguments": arguments})

    def addressed(self, name: str, arguments_json: str) -> tuple[str, str]:
        """Return the function behind a tool, and its arguments as JSON."""
        if name not in self._served:
            return f"tools/{name}", arguments_json
        function, tool = self._served[name]
        return function, self._server_call(function, tool, json.loads(arguments_json))

    def answered(self, name: str, answer: str) -> str:
        """Return the result of a tool as JSON, from its function's answer. Raises `ToolError`."""
        if name not in self._served:
            return answer
        found = parse_json(answer)
        if "error" in found:
            raise ToolError(
                f"{name}: {found['message']}", kind=found["error"], field=f"tools.{name}"
            )
        return json.dumps(found["result"])

    async def announce(self) -> None:
        """Register early, so that a faulty function is reported before anything runs.

        If the service is unreachable the first call registers. Raises `TroupeError`.
        """
        if not self._functions:
            return
        try:
            async with asyncio.timeout(_ANNOUNCE_SECONDS):
                await self._register_describer()
            async with asyncio.timeout(_DESCRIBE_SECONDS):
                await self.register()
            await self.list_servers()
        except ToolError as error:
            if error.kind not in _AWAY:
                raise FailedPrecondition(
                    error.message, field=error.field, value=error.value, remedy=error.remedy
                ) from error
            log.info("the reward service is away", job_id=self._job_id)
        except (TimeoutError, Unavailable, DeadlineExceeded):
            log.info("the reward service is away", job_id=self._job_id)

    async def register(self) -> None:
        """Register the functions with the job's costs, else their own. Raises `TroupeError`."""
        own = {n: f.code for n, f in self._functions.items() if f.code is not None}
        missing = sorted({e for name, e in own.items() if name not in self._described})
        if missing:
            described = await self._describe(missing)
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
            await self._register(spec)

    async def _register(self, spec: reward_pb.FunctionSpec) -> None:
        """Register a function, with the code that the job ships."""
        spec.source_sha256 = self._sha256
        request = reward_pb.RegisterFunctionRequest(request_id=new_id("register"), function=spec)
        try:
            await self._stub.RegisterFunction(request)
        except NotFound as error:
            if error.kind != kinds.SOURCE_NOT_FOUND:
                raise
            files = await asyncio.to_thread(self._sources.files, self._sha256)
            upload = reward_pb.UploadSourceRequest(request_id=new_id("upload"), files=files)
            await self._stub.UploadSource(upload)
            await self._stub.RegisterFunction(request)

    async def _register_describer(self) -> None:
        """Register the function that describes others. Raises `TroupeError`."""
        costs = {"cores": 0, "memory_mib": 0, "timeout_seconds": IMPORT_SECONDS + 10}
        await self._register(to_spec(*self._describer, _ENTRYPOINT, costs))

    @property
    def _describer(self) -> tuple[str, str]:
        """Name and version of the function that describes this job's functions."""
        if self._sha256:
            return f"{self._job_id}/describe", self._sha256[:16]
        return _NAME, __version__

    async def _describe(self, entrypoints: Collection[str]) -> dict[str, Described]:
        """Return the declarations of `entrypoints`. A function that cannot be described gets an
        empty declaration: its first call reports why. Raises `TroupeError` if the service cannot be
        reached."""
        attempts = Attempts(
            _DESCRIBE_AGAIN,
            retryable=lambda e: isinstance(e, NotFound) and e.kind == kinds.FUNCTION_NOT_FOUND,
        )
        while True:
            await self._register_describer()
            try:
                found = await asyncio.gather(
                    *(_describe(self._stub, self._describer, one) for one in entrypoints)
                )
            except NotFound as error:  # the service has restarted since
                await attempts.failed(error)
                log.info("the reward service forgot its functions", error=error.message)
            else:
                return dict(zip(entrypoints, found, strict=True))

    def _version(self, name: str) -> str:
        declared = self._described.get(name)
        return self._functions[name].version or (declared.version if declared else "1")

    def _key(self, name: str) -> tuple[str, str]:
        """Name and version by which the reward service knows the function."""
        if self._functions[name].function is not None:
            return self._functions[name].deployed
        return f"{self._job_id}/{name}", self._version(name)

    async def call(
        self,
        name: str,
        arguments_json: str,
        request: reward_pb.InvokeRequest,
        timeout: float,
        sandboxes: TrajectorySandboxes,
    ) -> str:
        """Return the result of `tools/...` or `rewards/...` as JSON, within `timeout` seconds.

        `request` has the trajectory's fields of the call; `sandboxes` is kept up to date. The call
        is repeated while the reward service is unreachable, restarts, or dies. Raises `ToolError`.
        Cancelling the task cancels the invocation.
        """
        if own := self._functions[name].arguments:  # arguments that the job passes to every call
            arguments_json = json.dumps({**json.loads(arguments_json), **own})
        request.arguments_json, request.job_id = arguments_json, self._job_id
        request.weight = self._weight
        request.sandboxes.extend(sorted(sandboxes.ids))
        try:
            async with asyncio.timeout(timeout):
                response = await sandboxes.record(self._until_answered(name, request, timeout))
        except (TimeoutError, DeadlineExceeded) as error:
            _in_background(self._cancel(request.invocation_id))
            raise ToolError(
                f"{name} gave no result within {timeout:.1f} s, including queueing",
                kind=kinds.DEADLINE,
                field=name.replace("/", "."),
                remedy="Raise limits.trajectory_seconds, or give the reward service more workers.",
            ) from error
        except asyncio.CancelledError:
            _in_background(self._cancel(request.invocation_id))
            raise
        except TroupeError as error:
            raise ToolError(
                f"{name}: {error.message}",
                kind=error.kind,
                field=name.replace("/", "."),
                remedy=error.remedy,
            ) from error
        if response.HasField("error"):
            kind = reward_pb.InvocationError.Kind.Name(response.error.kind)
            function = self._functions[name]
            raise ToolError(
                f"{name}: {response.error.message}",
                kind=kind.removeprefix("KIND_").lower(),
                field=name.replace("/", "."),
                value=function.code or function.function,
                remedy=_REMEDIES.get(response.error.kind),
                traceback=response.error.traceback,
            )
        return response.result_json

    async def _until_answered(
        self, name: str, request: reward_pb.InvokeRequest, timeout: float
    ) -> reward_pb.InvokeResponse:
        """Return the response of the function itself, result or error."""
        # Reward functions are declared stateless, but a tool whose worker died may have had its
        # effect.
        lives = LIVES if name.startswith("rewards/") else 1
        broken = Attempts(_CALL_AGAIN, retryable=lambda error: True)
        unknown = Attempts(_DEPLOYED_AGAIN, retryable=lambda error: True)
        while True:
            # A new id, since the service may remember how the former invocation ended.
            request.invocation_id = new_id("invoke")
            request.name, request.version = self._key(name)
            try:
                if name.startswith("rewards/"):
                    response = await self._coalescer.invoke(request, timeout)
                else:
                    response = await self._stub.Invoke(request, timeout=timeout)
            except NotFound as error:
                if self._functions[name].function is not None:
                    # The orchestrator registers deployed functions again after a restart.
                    await unknown.failed(error)
                    continue
                try:
                    await self._register_anew()
                except Unavailable as again:  # restarted once more
                    await broken.failed(again)
                continue
            except (Unavailable, Internal) as error:
                lives -= isinstance(error, Internal)
                if lives == 0:
                    raise
                log.info(
                    "an invocation broke", name=name, attempt=broken.failures + 1, error=str(error)
                )
                await broken.failed(error)
                continue
            kind = response.error.kind if response.HasField("error") else None
            if kind == reward_pb.InvocationError.KIND_WORKER_DIED:
                lives -= 1
                if lives > 0:
                    continue
            # The service cancelled the call (it stopped, or lost our connection), not we: call
            # again.
            if kind != reward_pb.InvocationError.KIND_CANCELLED:
                return response

    async def _register_anew(self) -> None:
        """Register after a restart of the service, once for all calls that notice it."""
        if self._registering is None or self._registering.done():
            log.info("the reward service forgot the functions", job_id=self._job_id)
            self._registering = asyncio.create_task(self.register())
        await asyncio.shield(self._registering)

    def close_later(self, trajectory_id: str) -> None:
        """End the sandboxes of a trajectory that has ended."""
        _in_background(self._close(trajectory_id))

    async def _close(self, trajectory_id: str) -> None:
        request = reward_pb.CloseTrajectoryRequest(
            request_id=new_id("close"), job_id=self._job_id, trajectory_id=trajectory_id
        )
        try:
            await self._stub.CloseTrajectory(request, timeout=_CLOSE_SECONDS)
        except Exception as error:  # also a channel that is closed already
            # The sandboxes end after their idle time.
            log.debug("a trajectory was not closed", error=str(error))

    async def _cancel(self, invocation_id: str) -> None:
        try:
            await self._stub.CancelInvocation(
                reward_pb.CancelInvocationRequest(invocation_id=invocation_id),
                timeout=_CANCEL_SECONDS,
            )
        except Exception as error:  # also a channel that is closed already
            # The invocation ends at its own timeout.
            log.debug("an invocation was not cancelled", error=str(error))


def _in_background(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)


@dataclass(eq=False)
class _Batch:
    """Calls of one function that wait to be sent in one message."""

    timer: asyncio.TimerHandle
    calls: list[tuple[reward_pb.InvokeRequest, float, asyncio.Future[reward_pb.InvokeResponse]]] = (
        field(default_factory=list)
    )
    size: int = 0


class Coalescer:
    """A sender that batches calls of short functions (`InvokeBatch`), and sends all others by
    `Invoke`."""

    def __init__(self, stub: RewardAsyncStub) -> None:
        self._stub = stub
        self._batches: dict[_Key, _Batch] = {}
        # Average seconds of a call, by function.
        self._seconds: dict[_Key, float] = {}
        self._sent: set[asyncio.Task[None]] = set()

    async def invoke(
        self, request: reward_pb.InvokeRequest, timeout: float
    ) -> reward_pb.InvokeResponse:
        """Return the response within `timeout` seconds. Raises the `TroupeError` of `Invoke`."""
        key = (request.name, request.version, request.job_id, request.priority, request.weight)
        if self._seconds.get(key, _SHORT_SECONDS) >= _SHORT_SECONDS:
            response = await self._stub.Invoke(request, timeout=timeout)
            self._learn(key, response)
            return response
        answer: asyncio.Future[reward_pb.InvokeResponse] = (
            asyncio.get_running_loop().create_future()
        )
        batch = self._batches.get(key)
        if batch is None:
            timer = asyncio.get_running_loop().call_later(_BATCH_SECONDS, self._send, key)
            batch = self._batches[key] = _Batch(timer)
        batch.calls.append((request, timeout, answer))
        batch.size += len(request.arguments_json)
        if len(batch.calls) >= _BATCH_CALLS or batch.size >= _BATCH_BYTES:
            self._send(key)
        response = await answer
        if response.error.kind == reward_pb.InvocationError.KIND_BAD_ARGUMENTS:
            raise InvalidArgument(response.error.message, field="arguments_json")
        return response

    def _send(self, key: _Key) -> None:
        batch = self._batches.pop(key)
        batch.timer.cancel()
        task = asyncio.create_task(self._answer(key, batch))
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)

    async def _answer(self, key: _Key, batch: _Batch) -> None:
        # Calls that were cancelled meanwhile are left out.
        calls = [call for call in batch.calls if not call[2].done()]
        if not calls:
            return
        name, version, job_id, priority, weight = key
        request = reward_pb.InvokeBatchRequest(
            name=name,
            version=version,
            job_id=job_id,
            priority=priority,
            weight=weight,
            calls=[
                reward_pb.BatchCall(
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
            # One of the calls, or their number, was refused: send each separately.
            await asyncio.gather(*(self._answer_alone(*call) for call in calls))
            return
        except Exception as error:
            for _, _, answer in calls:
                if not answer.done():
                    answer.set_exception(error)
            return
        too_large = []
        for call, response in zip(calls, reply.responses, strict=True):
            if response.error.kind == reward_pb.InvocationError.KIND_RESULT_TOO_LARGE:
                too_large.append(call)
                continue
            self._learn(key, response)
            if not call[2].done():
                call[2].set_result(response)
        # The service keeps results that did not fit into its answer. They are large: fetch them one
        # by one.
        for call in too_large:
            await self._answer_alone(*call)

    async def _answer_alone(
        self,
        request: reward_pb.InvokeRequest,
        timeout: float,
        answer: asyncio.Future[reward_pb.InvokeResponse],
    ) -> None:
        try:
            response = await self._stub.Invoke(request, timeout=timeout)
        except Exception as error:
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(response)

    def _learn(self, key: _Key, response: reward_pb.InvokeResponse) -> None:
        seconds = response.run_seconds - response.cold_start_seconds
        known = self._seconds.get(key, seconds)
        self._seconds[key] = known + _NEWEST_WEIGHT * (seconds - known)


async def list_described(stub: RewardAsyncStub) -> dict[tuple[str, str], Described]:
    """Return the declarations of the service's functions, by name and version. Raises
    `TroupeError`."""
    reply = await stub.ListFunctions(reward_pb.ListFunctionsRequest())
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


async def _describe(
    stub: RewardAsyncStub, describer: tuple[str, str], entrypoint: str
) -> Described:
    response = await stub.Invoke(
        reward_pb.InvokeRequest(
            invocation_id=new_id("describe"),
            name=describer[0],
            version=describer[1],
            arguments_json=json.dumps({"entrypoint": entrypoint}),
            priority=_PRIORITY,
        ),
        timeout=2 * IMPORT_SECONDS,
    )
    if response.HasField("error"):
        log.info(
            "a function could not be described", entrypoint=entrypoint, error=response.error.message
        )
        return Described(entrypoint)
    try:
        return Described(**parse_json(response.result_json))
    except (NotJsonError, TypeError) as error:  # an imported module has replaced the describer
        log.warning("a function is described as nothing", entrypoint=entrypoint, error=str(error))
        return Described(entrypoint)
