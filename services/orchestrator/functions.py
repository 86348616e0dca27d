"""Deployed functions, which are stored durably here and run by the reward service.

The reward service keeps functions only in memory, so they are registered again whenever it has
forgotten them. `FunctionGateway` is the reward service's API for users.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog

from services.orchestrator.errors import cancel_all
from services.orchestrator.state.redis import RedisAccess
from troupe.contracts import kinds
from troupe.functions.sources import check_files, digest
from troupe.functions.validation import NAME, VERSION
from troupe.job import CodeSpec, JobSpec
from troupe.rpc import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    TroupeError,
    Unavailable,
    Unimplemented,
    new_id,
)
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1 import reward_pb2_grpc as reward_grpc

if TYPE_CHECKING:
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub

T = TypeVar("T")
_log = structlog.get_logger(__name__)
# Kinds of errors of a reward service that has forgotten a function.
_FORGOTTEN: Final = (kinds.FUNCTION_NOT_FOUND, kinds.SOURCE_NOT_FOUND)
# Interval at which forgotten functions are restored.
_RESTORE_SECONDS: Final = 2.0
# Time limit of a call without a deadline.
_INVOKE_SECONDS: Final = 3600.0
# Time limit of the query for functions' mean times at the end of a step.
_MEAN_SECONDS: Final = 2.0
_PREFIX: Final = "troupe:orchestrator:{functions}"
# Hash: `name@version` -> FunctionSpec. Sorted set: `name@version` by when it was deployed.
# Hash: sha256 -> the UploadSourceRequest with its files. Set: `sha256/job_id` of jobs that ship it.
_SPECS: Final = f"{_PREFIX}:specs"
_ORDER: Final = f"{_PREFIX}:order"
_SOURCES: Final = f"{_PREFIX}:sources"
_SHIPPED: Final = f"{_PREFIX}:shipped"


class Catalogue:
    """Deployed functions in Redis. A name and version always stand for the same function."""

    def __init__(self, redis: RedisAccess) -> None:
        self._redis = redis

    async def keep_source(self, sha256: str, files: reward_pb.UploadSourceRequest) -> None:
        """Store source files by their hash."""
        kept = reward_pb.UploadSourceRequest(files=files.files)
        await self._redis.call("HSETNX", _SOURCES, sha256, kept.SerializeToString())

    async def source(self, sha256: str) -> reward_pb.UploadSourceRequest:
        """Return the source files. Raises `NotFound` of kind "source_not_found"."""
        kept = await self._redis.call("HGET", _SOURCES, sha256)
        if kept is None:
            raise NotFound(
                "no such source was uploaded",
                kind=kinds.SOURCE_NOT_FOUND,
                field="function.source_sha256",
                value=sha256,
                remedy="Upload it before the function that it belongs to.",
            )
        return reward_pb.UploadSourceRequest.FromString(kept)

    async def hold(self, job_id: str, code: CodeSpec | None) -> None:
        """Keep a job's source files until `release`.

        Raises `InvalidArgument` for a job that names files without sending them, `NotFound` of kind
        "source_not_found" for a hash of unknown files.
        """
        if code is None:
            return
        if code.sha256 is None:
            raise InvalidArgument(
                "the files that it names were not sent",
                field="code.sha256",
                remedy="Submit the job by `troupe` or the Python SDK, which send them.",
            )
        await self._redis.call("SADD", _SHIPPED, f"{code.sha256}/{job_id}")
        try:
            await self.source(code.sha256)
        except NotFound as error:
            await self._redis.call("SREM", _SHIPPED, f"{code.sha256}/{job_id}")
            error.field = "code.sha256"
            error.remedy = "Leave `code.sha256` out: the files are sent at submission."
            raise

    async def release(self, job_id: str) -> None:
        """Delete a job's source files, unless another job or a function uses them."""
        for member in await self._redis.call("SMEMBERS", _SHIPPED):
            sha256, _, holder = member.decode().partition("/")
            if holder == job_id:
                await self._redis.call("SREM", _SHIPPED, member)
                await self._delete_unused(sha256)

    async def _delete_unused(self, sha256: str) -> None:
        shipped = await self._redis.call("SMEMBERS", _SHIPPED)
        if any(member.decode().startswith(sha256) for member in shipped):
            return
        if all(spec.source_sha256 != sha256 for spec in await self.all()):
            await self._redis.call("HDEL", _SOURCES, sha256)

    async def check(self, spec: reward_pb.FunctionSpec) -> None:
        """Raise `AlreadyExists` if the name and version stand for another function."""
        kept = await self._redis.call("HGET", _SPECS, _key(spec))
        if kept is not None and reward_pb.FunctionSpec.FromString(kept) != spec:
            raise AlreadyExists(
                f"version {spec.version!r} of this function is deployed with other code or costs",
                kind="function_differs",
                field="function.name",
                value=spec.name,
                remedy="Deploy it under a new version, or delete the old one.",
            )

    async def keep(self, spec: reward_pb.FunctionSpec) -> None:
        """Store a function. Raises `AlreadyExists` like `check`."""
        key = _key(spec)
        kept = spec.SerializeToString(deterministic=True)
        if not await self._redis.call("HSETNX", _SPECS, key, kept):
            await self.check(spec)
        await self._redis.call("ZADD", _ORDER, "NX", time.time(), key)

    async def delete(self, name: str, version: str) -> bool:
        """Delete a function, and its source if nothing else uses it. Returns False if there was
        none."""
        key = f"{name}@{version}"
        kept = await self._redis.call("HGET", _SPECS, key)
        await self._redis.call("ZREM", _ORDER, key)
        await self._redis.call("HDEL", _SPECS, key)
        if kept is None:
            return False
        if sha256 := reward_pb.FunctionSpec.FromString(kept).source_sha256:
            await self._delete_unused(sha256)
        return True

    async def all(self) -> list[reward_pb.FunctionSpec]:
        """Return the functions, oldest deployment first."""
        keys = await self._redis.call("ZRANGE", _ORDER, 0, -1)
        if not keys:
            return []
        kept = await self._redis.call("HMGET", _SPECS, *keys)
        return [reward_pb.FunctionSpec.FromString(one) for one in kept if one is not None]

    async def find(self, name: str, version: str = "") -> reward_pb.FunctionSpec:
        """Return a function; without `version` the one deployed last. Raises `NotFound` of kind
        "function_not_found"."""
        found = [f for f in await self.all() if f.name == name and version in ("", f.version)]
        if not found:
            raise NotFound(
                f"no function of {f'version {version!r}' if version else 'this name'} is deployed",
                kind=kinds.FUNCTION_NOT_FOUND,
                field="name",
                value=name,
                remedy="`troupe functions list` shows them; `troupe functions deploy` adds one.",
            )
        return found[-1]


async def mean_seconds(reward: RewardAsyncStub, job_id: str) -> dict[str, float]:
    """Return the mean seconds per call of each called tool and reward function of a job; empty
    while the reward service is away."""
    found: dict[str, float] = {}
    with suppress(TroupeError):
        reply = await reward.ListFunctions(reward_pb.ListFunctionsRequest(), timeout=_MEAN_SECONDS)
        for one in reply.functions:
            owner, _, name = one.function.name.partition("/")
            if owner == job_id and one.invocations:
                found[name] = one.mean_seconds
    return found


class FunctionGateway(reward_grpc.RewardServicer):
    """The service `troupe.v1.Reward` for users, which deploys, calls and deletes functions, without
    the methods for workers and hosts. `reward` is the service that runs the functions."""

    def __init__(self, catalogue: Catalogue, reward: RewardAsyncStub) -> None:
        self.catalogue = catalogue
        self._reward = reward
        self._looking: asyncio.Task[None] | None = None
        # Why the reward service refuses a function at present, by function.
        self._refused: dict[str, str] = {}

    def start(self) -> None:
        """Start to restore functions."""
        self._looking = asyncio.create_task(self._restore_forever())

    async def stop(self) -> None:
        """Stop restoring functions."""
        if self._looking is not None:
            await cancel_all([self._looking])

    async def UploadSource(
        self, request: reward_pb.UploadSourceRequest, context: Any
    ) -> reward_pb.UploadSourceResponse:
        """Store source. The reward service gets it with the first function that needs it. Raises
        `InvalidArgument`."""
        check_files(request.files)
        sha256 = await asyncio.to_thread(digest, request.files)
        await self.catalogue.keep_source(sha256, request)
        return reward_pb.UploadSourceResponse(sha256=sha256)

    async def RegisterFunction(
        self, request: reward_pb.RegisterFunctionRequest, context: Any
    ) -> reward_pb.RegisterFunctionResponse:
        """Store a function if the reward service accepts it. Repeating it changes nothing.

        Raises `InvalidArgument` for a function that cannot work, `AlreadyExists` for a version of a
        different function, `NotFound` for a source that was not uploaded.
        """
        spec = request.function
        _check(spec)
        await self.catalogue.check(spec)
        await self._restore(spec)
        await self.catalogue.keep(spec)
        return reward_pb.RegisterFunctionResponse()

    async def DeleteFunction(
        self, request: reward_pb.DeleteFunctionRequest, context: Any
    ) -> reward_pb.DeleteFunctionResponse:
        """Delete a function, if it exists, and cancel its calls."""
        name, version = request.name, request.version
        if all((one.name, one.version) != (name, version) for one in await self.catalogue.all()):
            return reward_pb.DeleteFunctionResponse(deleted=False)
        delete = reward_pb.DeleteFunctionRequest(
            request_id=new_id("delete"), name=name, version=version
        )
        await self._reward.DeleteFunction(delete)
        return reward_pb.DeleteFunctionResponse(deleted=await self.catalogue.delete(name, version))

    async def _call(self, request: Any, invoke: Callable[..., Awaitable[T]], context: Any) -> T:
        """Return the reply of `invoke` to the request, which is repeated once if the service had
        forgotten the function.

        `request` names the function; without a version it means the one deployed last. Raises
        `NotFound` if none is deployed.
        """
        spec = await self._named(request)
        timeout = context.time_remaining() or _INVOKE_SECONDS
        try:
            return await invoke(request, timeout=timeout)
        except NotFound as error:
            if error.kind not in _FORGOTTEN:
                raise
            await self._restore(spec)
            return await invoke(request, timeout=timeout)

    async def _named(self, request: Any) -> reward_pb.FunctionSpec:
        """Return the function that a request names; sets the request's version. Raises
        `NotFound`."""
        spec = await self.catalogue.find(request.name, request.version)
        request.version = spec.version
        return spec

    async def check_job(self, spec: JobSpec) -> None:
        """Raise `InvalidArgument` unless every function that a job uses by name is deployed."""
        for section, functions in (("tools", spec.tools), ("rewards", spec.rewards)):
            for name, function in functions.items():
                if function.function is None:
                    continue
                try:
                    await self.catalogue.find(*function.deployed)
                except NotFound as error:
                    raise InvalidArgument(
                        error.message,
                        field=f"{section}.{name}.function",
                        value=function.function,
                        remedy=error.remedy,
                    ) from error

    async def ListFunctions(
        self, request: reward_pb.ListFunctionsRequest, context: Any
    ) -> reward_pb.ListFunctionsResponse:
        """Return the reward service's functions and all deployed ones, known to it or not.

        Functions of jobs come first (their names begin with the job's id), then deployed functions
        in their order. Raises `TroupeError`.
        """
        reply = await self._reward.ListFunctions(reward_pb.ListFunctionsRequest())
        deployed, known = await self.catalogue.all(), _known(reply)
        missing = [reward_pb.FunctionStatus(function=f) for f in deployed if _key(f) not in known]
        order = {_key(spec): place for place, spec in enumerate(deployed)}
        found = [*reply.functions, *missing]
        found.sort(key=lambda one: order.get(_key(one.function), -1))
        return reward_pb.ListFunctionsResponse(functions=found, pool=reply.pool)

    async def restore(self) -> None:
        """Register the deployed functions that the reward service lacks.

        A refused function is logged once and does not stop the others. Raises `TroupeError` if the
        service is away.
        """
        deployed = await self.catalogue.all()
        if not deployed:
            return
        known = _known(await self._reward.ListFunctions(reward_pb.ListFunctionsRequest()))
        for spec in deployed:
            if _key(spec) in known:
                self._refused.pop(_key(spec), None)
                continue
            try:
                await self._restore(spec)
            except TroupeError as error:
                if isinstance(error, Unavailable) and error.kind != kinds.HOSTS_EXPECTED:
                    raise
                text = str(error)
                if self._refused.get(_key(spec)) != text:
                    _log.warning("a deployed function was refused", function=_key(spec), error=text)
                self._refused[_key(spec)] = text

    async def _restore(self, spec: reward_pb.FunctionSpec) -> None:
        request = reward_pb.RegisterFunctionRequest(request_id=new_id("register"), function=spec)
        try:
            await self._reward.RegisterFunction(request)
        except NotFound as error:
            if error.kind != kinds.SOURCE_NOT_FOUND:
                raise
            source = await self.catalogue.source(spec.source_sha256)
            source.request_id = new_id("upload")
            await self._reward.UploadSource(source)
            await self._reward.RegisterFunction(request)

    async def _restore_forever(self) -> None:
        while True:
            try:
                await self.restore()
            except TroupeError as error:  # it is away
                _log.debug("deployed functions were not restored", error=str(error))
            except Exception:
                _log.exception("restoring deployed functions")
            await asyncio.sleep(_RESTORE_SECONDS)

    async def ListHosts(
        self, request: reward_pb.ListHostsRequest, context: Any
    ) -> reward_pb.ListHostsResponse:
        return await self._reward.ListHosts(request)

    async def Invoke(
        self, request: reward_pb.InvokeRequest, context: Any
    ) -> reward_pb.InvokeResponse:
        return await self._call(request, self._reward.Invoke, context)

    async def InvokeBatch(
        self, request: reward_pb.InvokeBatchRequest, context: Any
    ) -> reward_pb.InvokeBatchResponse:
        return await self._call(request, self._reward.InvokeBatch, context)

    async def InvokeStream(
        self, request: reward_pb.InvokeRequest, context: Any
    ) -> AsyncIterator[reward_pb.InvocationEvent]:
        # Not `_call`, since a stream is not repeated.
        spec = await self._named(request)
        if _key(spec) not in _known(
            await self._reward.ListFunctions(reward_pb.ListFunctionsRequest())
        ):
            await self._restore(spec)
        async for event in _relayed(self._reward.InvokeStream(request)):
            yield event

    async def CancelInvocation(
        self, request: reward_pb.CancelInvocationRequest, context: Any
    ) -> reward_pb.CancelInvocationResponse:
        return await self._reward.CancelInvocation(request)

    async def CloseTrajectory(
        self, request: reward_pb.CloseTrajectoryRequest, context: Any
    ) -> reward_pb.CloseTrajectoryResponse:
        return await self._reward.CloseTrajectory(request)

    async def ReadLogs(
        self, request: reward_pb.ReadLogsRequest, context: Any
    ) -> AsyncIterator[reward_pb.LogLine]:
        async for line in _relayed(self._reward.ReadLogs(request)):
            yield line

    async def AttachHost(self, request: Any, context: Any) -> AsyncIterator[reward_pb.HostCommand]:
        raise Unimplemented(
            "hosts attach to the reward service itself",
            field="address",
            remedy="Point the host at TROUPE_REWARD_ADDRESS of the cluster.",
        )
        yield  # a stream, like the service's


def _key(spec: reward_pb.FunctionSpec) -> str:
    return f"{spec.name}@{spec.version}"


def _known(reply: reward_pb.ListFunctionsResponse) -> set[str]:
    return {_key(one.function) for one in reply.functions}


def _check(spec: reward_pb.FunctionSpec) -> None:
    for field, shape in (("name", NAME), ("version", VERSION)):
        value = getattr(spec, field)
        if not shape.fullmatch(value):
            raise InvalidArgument(
                "is not a name" if field == "name" else "is not a version",
                field=f"function.{field}",
                value=value,
                remedy="Use letters, digits, '_', '-' and '.', at most 64 of them.",
            )


async def _relayed(call: Any) -> AsyncIterator[Any]:
    """Yield the messages of a stream, and cancel it when the caller stops reading."""
    try:
        async for message in call:
            yield message
    finally:
        call.cancel()
