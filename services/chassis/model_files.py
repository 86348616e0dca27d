"""Directories of models that only some hosts have: copies of them on the hosts that do not.

A job names models by hub id or by path. A path has to exist on the host of one trainer: workers of
other hosts copy the directory from there into `DATA_DIR/models/`, file by file, each verified by
its checksum. Nothing of it passes through the orchestrator, which only says where trainers are.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import structlog

from services.chassis.folders import files_below, write_folder
from services.chassis.settings import ServiceSettings
from services.chassis.transfer import HostTransfer
from troupe.job import JobSpec, PolicySpec, no_directory
from troupe.rpc import NO_RETRY, DeadlineExceeded, NotFound, TroupeError, connect
from troupe.v1 import trainer_pb2, trainer_pb2_grpc

log = structlog.get_logger("troupe.models")

# A directory is one of a model, tokenizer or adapter by any of these files; no other is served.
_MARKS: Final = ("config.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json")
_FIND_SECONDS: Final = 10.0
# A copy may take this long, and its size at this speed.
_LEAST_SECONDS: Final = 120.0
_LEAST_BYTES_PER_SECOND: Final = 20_000_000
_PROGRESS_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.2
# Characters of a copy's name.
_NAME_CHARS: Final = 32


def model_folder(path: str) -> Path:
    """The directory of a model, tokenizer or adapter on this host. Blocking. Raises `NotFound`."""
    root = Path(path).expanduser()
    if not any((root / mark).is_file() for mark in _MARKS):
        raise NotFound(
            "is no directory with a model here", kind="model_not_here", field="path", value=path
        )
    return root


def described_model(path: str) -> trainer_pb2.FindModelResponse:
    """Identity and size of the directory `path` of a model. Blocking. Raises `NotFound`."""
    root = model_folder(path)
    digest, size = hashlib.sha256(), 0
    for file in files_below(root):
        status = file.stat()
        size += status.st_size
        name = file.relative_to(root).as_posix()
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return trainer_pb2.FindModelResponse(digest=digest.hexdigest(), num_bytes=size)


class ModelFiles:
    """Finds the directories of a job's models on this host, or has them copied to it."""

    def __init__(self, host: HostTransfer, settings: ServiceSettings) -> None:
        """`host` asks the orchestrator for trainers."""
        self._host, self._settings = host, settings
        self._root = settings.data_dir.absolute() / "models"

    async def localized(self, spec: JobSpec) -> JobSpec:
        """The job with the paths of copies in place of directories that this host lacks.

        One that no trainer's host has stays as it is: whoever loads it says so. Raises what copying
        raises: `DataLoss`, `DeadlineExceeded`, OSError.
        """
        if not self._settings.shares_states:
            return spec
        policies = {name: await self._policy(policy) for name, policy in spec.policies.items()}
        if policies == spec.policies:
            return spec
        return spec.model_copy(update={"policies": policies})

    async def _policy(self, policy: PolicySpec) -> PolicySpec:
        changed: dict[str, Any] = {}
        if (model := policy.model) is not None:
            found = {name: await self._here(getattr(model, name)) for name in ("path", "tokenizer")}
            changed["model"] = model.model_copy(update=found)
        if policy.lora is not None:
            path = await self._here(policy.lora.path)
            changed["lora"] = policy.lora.model_copy(update={"path": path})
        return policy.model_copy(update=changed)

    async def _here(self, source: str | None) -> str | None:
        if source is None or not no_directory(source):
            return source
        try:
            trainers = (await asyncio.to_thread(self._host.directory, source)).trainers
        except TroupeError as error:
            log.warning("nobody says where trainers are", path=source, error=error.message)
            return source
        for address in trainers:
            if address == self._settings.address:
                continue
            async with connect(address, self._settings.client(retry=NO_RETRY)) as channel:
                trainer: Any = trainer_pb2_grpc.TrainerStub(channel)
                try:
                    request = trainer_pb2.FindModelRequest(path=source)
                    found = await trainer.FindModel(request, timeout=_FIND_SECONDS)
                except TroupeError as error:
                    log.info("no model there", path=source, at=address, error=error.message)
                    continue
                return str(await self._copied(source, found, address, trainer))
        return source

    async def _copied(
        self, source: str, found: trainer_pb2.FindModelResponse, address: str, trainer: Any
    ) -> Path:
        """The copy of a model, made by one process of this host."""
        target = self._root / found.digest[:_NAME_CHARS]
        seconds = _LEAST_SECONDS + found.num_bytes / _LEAST_BYTES_PER_SECOND
        until = time.monotonic() + seconds
        self._root.mkdir(parents=True, exist_ok=True)
        with _lock(self._root / f".{target.name}.lock") as take:
            while not target.is_dir():
                if time.monotonic() > until:
                    raise DeadlineExceeded(
                        f"{source} was not copied from {address} within {seconds:.0f} s",
                        field="model.path",
                        value=source,
                    )
                if not take():
                    await asyncio.sleep(_POLL_SECONDS)
                    continue
                if target.is_dir():
                    break
                log.info("copying a model", path=source, at=address, num_bytes=found.num_bytes)
                began = time.monotonic()
                request = trainer_pb2.ReadModelRequest(path=source)
                chunks = trainer.ReadModel(request, timeout=until - began)
                await write_folder(target, _reported(chunks, source, found.num_bytes))
                seconds = round(time.monotonic() - began, 1)
                log.info("model copied", path=source, to=str(target), seconds=seconds)
        return target


async def _reported(chunks: AsyncIterable[Any], source: str, total: int) -> AsyncIterator[Any]:
    """The chunks, with a line in the log for every `_PROGRESS_SECONDS`."""
    done, said = 0, time.monotonic()
    async for chunk in chunks:
        done += len(chunk.data)
        if time.monotonic() - said > _PROGRESS_SECONDS:
            said = time.monotonic()
            log.info("copying a model", path=source, done=done, num_bytes=total)
        yield chunk


@contextmanager
def _lock(path: Path) -> Iterator[Any]:
    """Context with a function that tries to lock `path` for this process; held until the end."""
    with path.open("a") as file:

        def take() -> bool:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False

        yield take
