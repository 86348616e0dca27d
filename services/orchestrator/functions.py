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
from troupe.rpc import InvalidArgument, NotFound, TroupeError, new_id
from troupe.v1 import reward_pb2 as pb

if TYPE_CHECKING:
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub

_log = structlog.get_logger(__name__)
_FORGOTTEN: Final = ("function_not_found", "source_not_found")
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

    async def restore(self) -> None:
        """Tell the service what it does not know (any more). Raises `TroupeError`."""
        deployed = await self.catalogue.all()
        if not deployed:
            return
        reply = await self.reward.ListFunctions(pb.ListFunctionsRequest())
        known = {(one.function.name, one.function.version) for one in reply.functions}
        for spec in deployed:
            if (spec.name, spec.version) not in known:
                await self._restore(spec)

    async def _restore(self, spec: pb.FunctionSpec) -> None:
        request = pb.RegisterFunctionRequest(request_id=new_id("register"), function=spec)
        if spec.source_sha256:
            source = await self.catalogue.source(spec.source_sha256)
            source.request_id = new_id("upload")
            await self.reward.UploadSource(source)
        await self.reward.RegisterFunction(request)

    async def _look(self) -> None:
        while True:
            try:
                await self.restore()
            except TroupeError as error:  # it is away, or refuses what it took before
                _log.debug("deployed functions were not restored", error=str(error))
            except Exception:
                _log.exception("looking after deployed functions")
            await asyncio.sleep(self._look_seconds)


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
