"""Deployed functions: kept here, run by the reward service, which is told them again whenever it
has forgotten them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog

from services.orchestrator.catalogue import Catalogue
from troupe.functions.declaration import NAME, VERSION
from troupe.job import JobSpec
from troupe.rpc import InvalidArgument, NotFound, TroupeError, Unavailable, new_id
from troupe.v1 import reward_pb2 as pb

if TYPE_CHECKING:
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub

_log = structlog.get_logger(__name__)
_FORGOTTEN: Final = ("function_not_found", "source_not_found")
# The service cannot know yet whether there is a host for it.
_HOSTS_EXPECTED: Final = "hosts_expected"
T = TypeVar("T")


class Functions:
    """What users do with functions; `reward` is the service that runs them."""

    def __init__(
        self, catalogue: Catalogue, reward: RewardAsyncStub, *, look_seconds: float = 2.0
    ) -> None:
        """Looks every `look_seconds` whether the service still knows what is deployed."""
        self.catalogue = catalogue
        self.reward = reward
        self._look_seconds = look_seconds
        self._looking: asyncio.Task[None] | None = None
        # What the service did not take any more, and why.
        self._refused: dict[str, str] = {}

    def start(self) -> None:
        """Begin to look after the service."""
        self._looking = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """Leave it alone."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def upload(self, request: pb.UploadSourceRequest) -> pb.UploadSourceResponse:
        """Keep source, here and there. Raises `TroupeError`, as the service does."""
        reply = await self.reward.UploadSource(request)
        await self.catalogue.keep_source(reply.sha256, request)
        return reply

    async def deploy(self, spec: pb.FunctionSpec) -> None:
        """Keep a function that the service takes. Repeating it changes nothing.

        Raises `InvalidArgument` for what cannot work, `AlreadyExists` for a version that stands
        for another function, `NotFound` for a source that was not uploaded.
        """
        _check(spec)
        await self.catalogue.check(spec)
        await self._restore(spec)
        await self.catalogue.keep(spec)

    async def delete(self, name: str, version: str) -> bool:
        """Forget a function; its calls are cancelled. False: there was none."""
        if all((one.name, one.version) != (name, version) for one in await self.catalogue.all()):
            return False
        request = pb.DeleteFunctionRequest(request_id=new_id("delete"), name=name, version=version)
        await self.reward.DeleteFunction(request)
        return await self.catalogue.delete(name, version)

    async def call(self, request: Any, invoke: Callable[[], Awaitable[T]]) -> T:
        """`invoke()`, again if the service had forgotten the function that `request` names.

        Without a version it is the one deployed last. Raises `NotFound` when none is deployed.
        """
        spec = await self.named(request)
        try:
            return await invoke()
        except NotFound as error:
            if error.kind not in _FORGOTTEN:
                raise
            await self._restore(spec)
            return await invoke()

    async def named(self, request: Any) -> pb.FunctionSpec:
        """The function of a request, which gets its version. Raises `NotFound`."""
        spec = await self.catalogue.find(request.name, request.version)
        request.version = spec.version
        return spec

    async def check_job(self, spec: JobSpec) -> None:
        """Raises `InvalidArgument` unless every function that a job takes by name is deployed."""
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

    async def list(self) -> pb.ListFunctionsResponse:
        """What the service knows, and what is deployed and it was not told yet or does not take any
        more. Those that are deployed last, in their order. Raises `TroupeError`."""
        reply = await self.reward.ListFunctions(pb.ListFunctionsRequest())
        deployed, known = await self.catalogue.all(), _known(reply)
        missing = [pb.FunctionStatus(function=f) for f in deployed if _key(f) not in known]
        order = {_key(spec): place for place, spec in enumerate(deployed)}
        found = [*reply.functions, *missing]
        found.sort(key=lambda one: order.get(_key(one.function), -1))
        return pb.ListFunctionsResponse(functions=found, pool=reply.pool)

    async def tell(self, spec: pb.FunctionSpec) -> None:
        """Have the service know this function. Raises `TroupeError`."""
        if _key(spec) not in _known(await self.reward.ListFunctions(pb.ListFunctionsRequest())):
            await self._restore(spec)

    async def restore(self) -> None:
        """Tell the service what it does not know (any more). Raises `TroupeError` when it is away.

        What it does not take any more keeps nothing else from being told.
        """
        deployed = await self.catalogue.all()
        if not deployed:
            return
        known = _known(await self.reward.ListFunctions(pb.ListFunctionsRequest()))
        for spec in deployed:
            if _key(spec) in known:
                self._refused.pop(_key(spec), None)
                continue
            try:
                await self._restore(spec)
            except TroupeError as error:
                if isinstance(error, Unavailable) and error.kind != _HOSTS_EXPECTED:
                    raise
                said = str(error)
                if self._refused.get(_key(spec)) != said:
                    _log.warning("a deployed function was refused", function=_key(spec), error=said)
                self._refused[_key(spec)] = said

    async def _restore(self, spec: pb.FunctionSpec) -> None:
        request = pb.RegisterFunctionRequest(request_id=new_id("register"), function=spec)
        try:
            await self.reward.RegisterFunction(request)
        except NotFound as error:
            if error.kind != "source_not_found":
                raise
            source = await self.catalogue.source(spec.source_sha256)
            source.request_id = new_id("upload")
            await self.reward.UploadSource(source)
            await self.reward.RegisterFunction(request)

    async def _look(self) -> None:
        while True:
            try:
                await self.restore()
            except TroupeError as error:  # it is away
                _log.debug("deployed functions were not restored", error=str(error))
            except Exception:
                _log.exception("looking after deployed functions")
            await asyncio.sleep(self._look_seconds)


def _key(spec: pb.FunctionSpec) -> str:
    return f"{spec.name}@{spec.version}"


def _known(reply: pb.ListFunctionsResponse) -> set[str]:
    return {_key(one.function) for one in reply.functions}


def _check(spec: pb.FunctionSpec) -> None:
    for field, shape in (("name", NAME), ("version", VERSION)):
        value = getattr(spec, field)
        if not shape.fullmatch(value):
            raise InvalidArgument(
                "is no name" if field == "name" else "is no version",
                field=f"function.{field}",
                value=value,
                remedy="Use letters, digits, '_', '-' and '.', at most 64 of them.",
            )
