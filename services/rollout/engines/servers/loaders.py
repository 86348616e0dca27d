"""Ways to get tensors into a paused server: a directory, requests, or one after the other."""

from __future__ import annotations

import asyncio
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from services.rollout.engines.errors import EngineStartFailed, Refused
from services.rollout.engines.requests import UpdateWave
from services.rollout.engines.servers.interface import InferenceServer, ServerDescription, Way
from troupe.transfer import Transfer
from troupe.transfer.in_place import ModelDirectory
from troupe.v1 import common_pb2 as common_pb

log = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]
UpdateSetting = Literal["auto", "tensor", "disk", "ipc", "broadcast"]

# Bytes per tensor call by handles: bounds the shared memory that one call holds.
_BUCKET_BYTES: Final = 1 << 30
# The same by value: bounds the request, which both sides hold several times.
_VALUE_BUCKET_BYTES: Final = 128 << 20
# The way that each setting but `auto` asks for.
_NEEDED: Final[Mapping[str, Way]] = {
    "tensor": "tensors",
    "disk": "directory",
    "ipc": "ipc",
    "broadcast": "broadcast",
}


@dataclass(frozen=True)
class NewWeights:
    """A version that is to be loaded. `tensors`: each tensor once. `source`: where it is published
    under the key of `ref`; None if it is not published with just these tensors. `wave`: the engines
    that load it from the trainer's device together. `ahead`: it is not committed or published yet,
    and `tensors` have no values."""

    tensors: Mapping[str, torch.Tensor]
    ref: common_pb.WeightsRef
    source: Transfer | None = None
    wave: UpdateWave = field(default_factory=UpdateWave.of)
    ahead: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Loader(ABC):
    """A way to get tensors into a paused server."""

    # Updates that were to take a direct way, and took another.
    fallbacks = 0

    @property
    @abstractmethod
    def way(self) -> str:
        """Name, in metrics, of the way that the weights prepared last take."""

    def takes_from_trainer(self, ref: common_pb.WeightsRef) -> bool:
        """Return whether `ref` would be loaded from the device of its trainer."""
        return False

    @abstractmethod
    async def prepare(self, weights: NewWeights) -> None:
        """The part that can be done while the server still serves."""

    async def reserve(self) -> None:
        """The last part before the pause: take what only one server may use at a time."""
        return

    async def reserve_ahead(self, weights: NewWeights) -> bool:
        """Like `reserve`, without `prepare`, for weights that are not committed. Returns whether
        `load_ahead` may follow."""
        return False

    async def load_ahead(self) -> None:
        """Like `load`, after `reserve_ahead`. Raises `UpdateFailed` and `ServerGone`; the server
        may then hold a part of the weights."""
        raise NotImplementedError

    @abstractmethod
    async def load(self, server: InferenceServer, *, flush: bool) -> bool:
        """Load the prepared weights, while the server is paused; `flush`: forget cached
        prefixes in the same call, if that is possible. Returns whether they were forgotten. Raises
        the server's errors."""

    async def release(self) -> None:
        """Free what was reserved, whatever became of the update. Repeatable."""
        return

    @abstractmethod
    async def loaded(self) -> None:
        """After a `load` that succeeded, while the server serves again: free what it needed."""

    @abstractmethod
    async def put(self, server: InferenceServer, tensors: Tensors, name: str) -> None:
        """Load some tensors over those that the server holds, and name the whole. Raises the
        server's errors."""


class DirectoryLoader(Loader):
    """Through a model directory that the server sees: the published file in place where there is
    one (`Transfer.model_directory`), else a file that is written for it, in shared memory by
    default."""

    def __init__(self, directory: Path, config: PretrainedConfig) -> None:
        self._directory = directory
        self._config = config
        self._weights: NewWeights | None = None
        self._linked: ModelDirectory | None = None
        # Of the version that was prepared last.
        self._num_bytes = 0

    @property
    def way(self) -> str:
        """`in_place`, or `file` for a copy."""
        return "file" if self._linked is None else "in_place"

    async def prepare(self, weights: NewWeights) -> None:
        """Make the version's directory."""
        self._num_bytes, self._weights = weights.num_bytes, weights
        await asyncio.to_thread(self._make, weights)

    async def load(self, server: InferenceServer, *, flush: bool) -> bool:
        """Have the server read the directory. Flushing by itself would also return memory to the
        allocator, which takes longer than the load of a small model."""
        assert self._weights is not None  # prepared
        path, version = str(self._path), str(self._weights.ref.version)
        if flush:
            try:
                await server.load_directory(path, version, self._num_bytes, flush=True)
                return True
            except Refused as error:  # perhaps of the flush only: the weights are in then
                log.info("%s is asked again, without a flush: %s", server.url, error)
        await server.load_directory(path, version, self._num_bytes, flush=False)
        return False

    async def loaded(self) -> None:
        """Remove the directory. (After a failure it stays until the next version's is made: the
        server may read it again.)"""
        self._weights = None
        await asyncio.to_thread(self._remove)

    async def put(self, server: InferenceServer, tensors: Tensors, name: str) -> None:
        """Write the tensors to a temporary directory and have the server read it."""
        path = self._directory / "some"
        try:
            await asyncio.to_thread(self._write, tensors, path)
            await server.load_directory(str(path), name, self._num_bytes, flush=False)
        finally:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    @property
    def _path(self) -> Path:
        return self._directory / "version" if self._linked is None else self._linked.path

    def _make(self, weights: NewWeights) -> None:
        self._remove()
        self._linked = None
        if weights.source is not None:
            files = {"config.json": self._config.to_json_string().encode()}
            try:
                self._linked = weights.source.model_directory(
                    weights.ref.key, files, expected_checksum=weights.ref.checksum
                )
                return
            except OSError as error:
                log.warning("%s cannot be read in place: %s", weights.ref.key, error)
        self._write(weights.tensors, self._path)

    def _remove(self) -> None:
        if self._linked is not None:
            self._linked.close()
        shutil.rmtree(self._directory / "version", ignore_errors=True)

    def _write(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        self._config.save_pretrained(path)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path / "model.safetensors",
            metadata={"format": "pt"},
        )


class TensorLoader(Loader):
    """As tensors in requests.

    `shared`: the server shares this process's memory and gets handles; otherwise values.
    `names_version`: a call of its own names the version.
    """

    def __init__(self, *, shared: bool, names_version: bool) -> None:
        self._shared = shared
        self._names_version = names_version
        self._weights: tuple[Mapping[str, torch.Tensor], int] | None = None

    @property
    def way(self) -> str:
        """`handles` of shared memory, or `values`."""
        return "handles" if self._shared else "values"

    async def prepare(self, weights: NewWeights) -> None:
        """Keep the tensors for `load`: nothing can be sent before the pause."""
        self._weights = weights.tensors, weights.ref.version

    async def load(self, server: InferenceServer, *, flush: bool) -> bool:
        """Send the tensors bucket by bucket; nothing is flushed."""
        assert self._weights is not None  # prepared
        tensors, version = self._weights
        await self._send(server, tensors, str(version))
        return False

    async def loaded(self) -> None:
        """Let go of the tensors."""
        self._weights = None

    async def put(self, server: InferenceServer, tensors: Tensors, name: str) -> None:
        """Send the tensors as in an update."""
        await self._send(server, tensors, name)

    async def _send(self, server: InferenceServer, tensors: Tensors, name: str) -> None:
        size = _BUCKET_BYTES if self._shared else _VALUE_BUCKET_BYTES
        async with server.updating():
            groups = list(buckets(tensors.items(), size))
            for number, bucket in enumerate(groups, start=1):
                # Only with the last bucket: a server that fails half-way must not name the version.
                last = number == len(groups) and not self._names_version
                await server.load_tensors(bucket, name if last else None, shared=self._shared)


class EitherLoader(Loader):
    """The first loader; once a server has refused it, the second one."""

    def __init__(self, first: Loader, second: Loader) -> None:
        self._active, self._other = first, second
        self._prepared: NewWeights | None = None

    @property
    def way(self) -> str:
        """How the loader in use loads weights."""
        return self._active.way

    async def prepare(self, weights: NewWeights) -> None:
        """Prepare the loader in use."""
        self._prepared = weights
        await self._active.prepare(weights)

    async def load(self, server: InferenceServer, *, flush: bool) -> bool:
        """Load, by the second loader if the first is refused."""
        prepared, self._prepared = self._prepared, None
        try:
            return await self._active.load(server, flush=flush)
        except Refused as error:
            if self._other is self._active or prepared is None:
                raise
            log.warning("%s takes no weights this way, trying another: %s", server.url, error)
            await self._other.prepare(prepared)
            flushed = await self._other.load(server, flush=flush)
            await self._active.loaded()
            self._active = self._other
            return flushed

    async def loaded(self) -> None:
        """Free what the loader in use needed."""
        await self._active.loaded()

    async def put(self, server: InferenceServer, tensors: Tensors, name: str) -> None:
        """By the loader in use."""
        await self._active.put(server, tensors, name)


def choose_loader(
    setting: UpdateSetting,
    server: ServerDescription,
    directory: DirectoryLoader,
    *,
    launched: bool,
    near: bool,
    policy: str,
) -> Loader:
    """The loader that `policies.X.engine.update` and the server allow.

    `launched`: by this process, with which it shares memory. `near`: its address is this host's.
    Raises `EngineStartFailed` when the setting asks for a way that the server lacks.
    """
    if setting != "auto" and _NEEDED[setting] not in server.ways:
        raise EngineStartFailed(
            "the server takes no weights in this way",
            field=f"policies.{policy}.engine.update",
            value=setting,
            remedy="Use `auto` or `disk`, or a newer release.",
        )
    tensors = TensorLoader(shared=launched, names_version=server.names_versions)
    if setting == "disk" or "tensors" not in server.ways:
        return directory
    if setting == "tensor" or not near:
        return tensors
    # It reads the published file in place, unless it is in a container that does not see it.
    return EitherLoader(directory, tensors)


def buckets(
    items: Iterable[tuple[str, torch.Tensor]], limit: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """`items` in groups of at most `limit` bytes; a larger tensor is a group of its own."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in items:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
