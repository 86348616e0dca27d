"""Model directories that exist only on some hosts, and their copies on the other hosts.

A job names models by hub id or by path. A path must exist on one host of the cluster, a worker's or
the orchestrator's: workers on other hosts copy the directory into `DATA_DIR/models/`, file by file,
each verified by its checksum. A host serves only a few readers at a time, with originals or copies,
so that many hosts get a model from each other instead of all from its original host.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import random
import shutil
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from services.chassis.folders import files_below, read_folder, write_folder
from services.chassis.settings import ServiceSettings
from troupe.disks import SLOWEST_BYTES_PER_SECOND
from troupe.job import JobSpec, PolicySpec, no_directory
from troupe.rpc import (
    NO_RETRY,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TroupeError,
    Unavailable,
    connect,
)
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import transfer_pb2 as transfer_pb
from troupe.v1 import transfer_pb2_grpc as transfer_grpc

if TYPE_CHECKING:
    from troupe.v1.orchestrator_pb2_grpc import OrchestratorAsyncStub

log = structlog.get_logger("troupe.models")

# A directory counts as a model, tokenizer or adapter if it has one of these files; others are not
# served.
_MARKS: Final = ("config.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json")
_FIND_SECONDS: Final = 10.0
# Time limit of a copy, in addition to the time for its size at the speed of the slowest disk.
_LEAST_SECONDS: Final = 120.0
_PROGRESS_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.2
# Characters of a copy's name.
_NAME_CHARS: Final = 32
# Maximum number of hosts to which a process sends models simultaneously: more would share its
# network bandwidth, and all end late.
_READERS: Final = 4
# Seconds after which a host whose sources all serve others asks again.
_BUSY_SECONDS: Final = 1.0


def model_folder(path: str) -> Path:
    """Return the directory of a model, tokenizer or adapter on this host. Blocking. Raises
    `NotFound`."""
    # pathlib raises for names that are too long, and for the home of an unknown user.
    root = Path(os.path.expanduser(path))
    if not any(os.path.isfile(root / mark) for mark in _MARKS):
        raise NotFound(
            "is not a directory with a model here", kind="model_not_here", field="path", value=path
        )
    return root


def described_model(path: str) -> transfer_pb.FindModelResponse:
    """Return identity and size of the model directory `path`. Blocking. Raises `NotFound`."""
    root = model_folder(path)
    digest, size = hashlib.sha256(), 0
    for file in files_below(root):
        status = file.stat()
        size += status.st_size
        name = file.relative_to(root).as_posix()
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return transfer_pb.FindModelResponse(digest=digest.hexdigest(), num_bytes=size)


class ModelServer(transfer_grpc.HostModelsServicer):
    """A server of this host's model directories, for workers on hosts that lack them."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._copies = settings.data_dir.absolute() / "models"
        self._readers = 0

    async def FindModel(  # noqa: N802 - as gRPC names it
        self, request: transfer_pb.FindModelRequest, context: Any
    ) -> transfer_pb.FindModelResponse:
        """Identify a model directory of this host."""
        return await asyncio.to_thread(described_model, request.path)

    async def ReadModel(  # noqa: N802 - as gRPC names it
        self, request: transfer_pb.ReadModelRequest, context: Any
    ) -> AsyncIterator[transfer_pb.ModelChunk]:
        """Stream the files of a model directory, or of this host's copy of it.

        Raises ResourceExhausted of kind "host_busy" while `_READERS` other hosts read.
        """
        root = await asyncio.to_thread(self._with, request.path, request.digest)
        if self._readers >= _READERS:
            raise ResourceExhausted(
                f"this host sends models to {self._readers} others", kind="host_busy"
            )
        self._readers += 1
        try:
            async for chunk in read_folder(root, transfer_pb.ModelChunk):
                yield chunk
        finally:
            self._readers -= 1

    def _with(self, path: str, digest: str) -> Path:
        """Return the directory with this content. Raises `NotFound`."""
        copy = self._copies / digest[:_NAME_CHARS]
        if len(digest) >= _NAME_CHARS and digest.isalnum() and copy.is_dir():
            return copy
        root = model_folder(path)
        if described_model(path).digest != digest:
            raise NotFound(
                "has changed since it was described", kind="model_changed", field="path", value=path
            )
        return root


@dataclass(frozen=True)
class _Model:
    """A directory of another host."""

    source: str
    digest: str
    num_bytes: int
    # Hosts that may have it: "host:port" of each.
    hosts: tuple[str, ...]


class ModelFiles:
    """The directories of a job's models, found on this host or copied to it."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._root = settings.data_dir.absolute() / "models"

    async def localized(self, spec: JobSpec, orchestrator: OrchestratorAsyncStub) -> JobSpec:
        """Return the job with the paths of copies in place of directories that this host lacks.

        `orchestrator` knows the workers' addresses. Raises `InvalidArgument` of kind
        "model_not_found" for a directory that no host has, and the errors of copying: `DataLoss`,
        `DeadlineExceeded`, OSError. While the orchestrator is unavailable, paths are not changed:
        loading from them reports the error.
        """
        if not self._settings.shares_states:
            return spec
        policies = {
            name: await self._policy(f"policies.{name}", policy, orchestrator)
            for name, policy in spec.policies.items()
        }
        if policies == spec.policies:
            return spec
        return spec.model_copy(update={"policies": policies})

    async def _policy(
        self, field: str, policy: PolicySpec, orchestrator: OrchestratorAsyncStub
    ) -> PolicySpec:
        changed: dict[str, Any] = {}
        if (model := policy.model) is not None:
            found = {
                name: await self._here(f"{field}.model.{name}", getattr(model, name), orchestrator)
                for name in ("path", "tokenizer")
            }
            changed["model"] = model.model_copy(update=found)
        if policy.lora is not None:
            path = await self._here(f"{field}.lora.path", policy.lora.path, orchestrator)
            changed["lora"] = policy.lora.model_copy(update={"path": path})
        return policy.model_copy(update=changed)

    async def _here(
        self, field: str, source: str | None, orchestrator: OrchestratorAsyncStub
    ) -> str | None:
        if source is None or not no_directory(source):
            return source
        request = orchestrator_pb.LocateStateRequest(key=source)
        try:
            said = await orchestrator.LocateState(request, timeout=_FIND_SECONDS)
        except TroupeError as error:
            log.warning("the addresses of workers are unknown", path=source, error=error.message)
            return source
        hosts = (*said.trainers, *said.rollouts, self._settings.orchestrator_address)
        return str(await self._copied(await self._found(field, source, hosts)))

    async def _found(self, field: str, source: str, hosts: tuple[str, ...]) -> _Model:
        """Return the description of the directory by the first host that has it, and the hosts to
        copy from.

        Raises `InvalidArgument` of kind "model_not_found" if none has it.
        """
        others = tuple(one for one in dict.fromkeys(hosts) if one != self._settings.address)
        silent: list[str] = []
        for address in others:
            async with connect(address, self._settings.client(retry=NO_RETRY)) as channel:
                models: Any = transfer_grpc.HostModelsStub(channel)
                try:
                    request = transfer_pb.FindModelRequest(path=source)
                    found = await models.FindModel(request, timeout=_FIND_SECONDS)
                except NotFound:
                    continue
                except TroupeError as error:
                    log.info("no model there", path=source, at=address, error=error.message)
                    silent.append(f"{address} ({error.message})")
                    continue
                # First the originals, beginning with the directory just found, then the copies.
                rest = [one for one in others if one != address]
                return _Model(source, found.digest, found.num_bytes, (address, *rest))
        unheard = f"; no answer from {', '.join(silent)}" if silent else ""
        raise InvalidArgument(
            f"there is no such directory on {self._settings.address}, nor on any of "
            f"{', '.join(others) or 'no others'}{unheard}",
            kind="model_not_found",
            field=field,
            value=source,
            remedy="Put the model on one of these hosts (the last is the head), from which the "
            "others copy it, or name it by its id on the hub.",
        )

    async def _copied(self, model: _Model) -> Path:
        """Return the copy of a model, made by one process of this host."""
        target = self._root / model.digest[:_NAME_CHARS]
        seconds = _LEAST_SECONDS + model.num_bytes / SLOWEST_BYTES_PER_SECOND
        until = time.monotonic() + seconds
        self._root.mkdir(parents=True, exist_ok=True)
        with _lock(self._root / f".{target.name}.lock") as take:
            while not target.is_dir():
                if time.monotonic() > until:
                    raise DeadlineExceeded(
                        f"{model.source} was not copied from any of {', '.join(model.hosts)} "
                        f"within {seconds:.0f} s",
                        field="model.path",
                        value=model.source,
                    )
                if not take():
                    await asyncio.sleep(_POLL_SECONDS)
                    continue
                if not target.is_dir():
                    await self._copy(model, target, until)
        return target

    async def _copy(self, model: _Model, target: Path, until: float) -> None:
        """Copy a model from a host that has it and sends it; return without a copy if all are
        busy."""
        for left in self._root.glob(f".{target.name}.*.tmp"):  # left by a killed process
            await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
        first, *rest = model.hosts
        # Copies before the original, in random order.
        for address in (*random.sample(rest, len(rest)), first):
            began = time.monotonic()
            async with connect(address, self._settings.client(retry=NO_RETRY)) as channel:
                stub: Any = transfer_grpc.HostModelsStub(channel)
                request = transfer_pb.ReadModelRequest(path=model.source, digest=model.digest)
                chunks = stub.ReadModel(request, timeout=max(0.0, until - began))
                try:
                    await write_folder(target, _reported(chunks, model, address))
                except (NotFound, ResourceExhausted, Unavailable) as error:
                    log.debug("no copy from there", at=address, error=error.message)
                    continue
            seconds = round(time.monotonic() - began, 1)
            log.info("model copied", path=model.source, to=str(target), seconds=seconds)
            return
        await asyncio.sleep(_BUSY_SECONDS)


async def _reported(chunks: AsyncIterable[Any], model: _Model, address: str) -> AsyncIterator[Any]:
    """Yield the chunks, with a line in the log for the first and for every `_PROGRESS_SECONDS`."""
    done, said = 0, 0.0
    async for chunk in chunks:
        if time.monotonic() - said > _PROGRESS_SECONDS:
            said = time.monotonic()
            size = model.num_bytes
            log.info("copying a model", path=model.source, at=address, done=done, num_bytes=size)
        done += len(chunk.data)
        yield chunk


@contextmanager
def _lock(path: Path) -> Iterator[Any]:
    """Yield a function that tries to lock `path` for this process; unlock it at the end."""
    with path.open("a") as file:

        def take() -> bool:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False

        yield take
