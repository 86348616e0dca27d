"""Ways to get published tensors into a server."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import pickle
import shutil
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from services.rollout.engines.errors import EngineStartFailed
from services.rollout.engines.sglang.client import Refused, SglangClient
from services.rollout.engines.sglang.features import Features

log = logging.getLogger(__name__)

UpdateSetting = Literal["auto", "tensor", "disk"]

# Bytes per tensor call: bounds the shared memory that one call holds.
_BUCKET_BYTES: Final = 1 << 30
# The same by value: bounds the request, which both sides hold several times.
_VALUE_BUCKET_BYTES: Final = 128 << 20
# The newest versions on disk: a server may still read the one before.
_KEEP: Final = 2


class Loader(Protocol):
    """Puts tensors into a paused server."""

    async def prepare(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """What can be done while the server still serves."""
        ...

    async def load(self, client: SglangClient, version: int) -> None:
        """What needs it paused. Raises the client's errors."""
        ...

    async def put(
        self, client: SglangClient, tensors: Mapping[str, torch.Tensor], version: int
    ) -> None:
        """Load some tensors over those of `version`, which the server holds. Raises the client's
        errors."""
        ...


class DiskLoader:
    """Through safetensors in a directory that the server sees; in shared memory by default."""

    def __init__(self, directory: Path, config: PretrainedConfig) -> None:
        self._directory = directory
        self._config = config
        # Of the version that was written last.
        self._num_bytes = 0

    async def prepare(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Write the version's directory."""
        self._num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        await asyncio.to_thread(self._write, tensors, self._path(version))

    async def load(self, client: SglangClient, version: int) -> None:
        """Have the server read it; versions before the last two are deleted."""
        await client.update_from_disk(str(self._path(version)), str(version), self._num_bytes)
        old = sorted(self._directory.glob("v*"), key=lambda path: path.stat().st_mtime)
        for path in old[:-_KEEP]:
            shutil.rmtree(path, ignore_errors=True)

    async def put(
        self, client: SglangClient, tensors: Mapping[str, torch.Tensor], version: int
    ) -> None:
        """By a directory of their own, for as long as it is read."""
        path = self._directory / "some"
        try:
            await asyncio.to_thread(self._write, tensors, path)
            await client.update_from_disk(str(path), str(version), self._num_bytes)
        finally:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    def _path(self, version: int) -> Path:
        return self._directory / f"v{version}"

    def _write(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        self._config.save_pretrained(path)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path / "model.safetensors",
            metadata={"format": "pt"},
        )


class TensorLoader:
    """As tensors, in SGLang's own encoding, which is a pickle (never used for our own messages).

    `shared`: the server shares this machine's memory and gets handles; otherwise the values.
    `names_version`: the version is named by a call of its own.
    """

    def __init__(self, ranks: int, *, sessions: bool, shared: bool, names_version: bool) -> None:
        self._ranks = ranks
        self._sessions = sessions
        self._shared = shared
        self._names_version = names_version
        self._tensors: Mapping[str, torch.Tensor] = {}

    async def prepare(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Nothing can be done before the pause."""
        self._tensors = tensors

    async def load(self, client: SglangClient, version: int) -> None:
        """Bucket by bucket, within a session where the server wants one."""
        encode = shared_payload if self._shared else payload
        size = _BUCKET_BYTES if self._shared else _VALUE_BUCKET_BYTES
        if self._sessions:
            await client.begin_update()
        try:
            buckets = list(_buckets(self._tensors.items(), size))
            for number, bucket in enumerate(buckets, start=1):
                data = await asyncio.to_thread(encode, bucket)
                # Named too early, a server that breaks off half-way would lie about what it has.
                last = number == len(buckets) and not self._names_version
                named = str(version) if last else None
                num_bytes = sum(tensor.nbytes for _, tensor in bucket)
                await client.update_from_tensors([data] * self._ranks, named, num_bytes)
        finally:
            self._tensors = {}
            if self._sessions:
                await client.end_update()

    async def put(
        self, client: SglangClient, tensors: Mapping[str, torch.Tensor], version: int
    ) -> None:
        """As any others."""
        await self.prepare(tensors, version)
        await self.load(client, version)


class EitherLoader:
    """The first way, and for good the second once a server has refused the first."""

    def __init__(self, first: Loader, second: Loader) -> None:
        self._way, self._other = first, second
        self._prepared: tuple[Mapping[str, torch.Tensor], int] | None = None

    async def prepare(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Prepare the way that is used now."""
        self._prepared = tensors, version
        await self._way.prepare(tensors, version)

    async def load(self, client: SglangClient, version: int) -> None:
        """Load, the other way if this one is refused."""
        prepared, self._prepared = self._prepared, None
        try:
            await self._way.load(client, version)
        except Refused as error:
            if self._other is self._way or prepared is None:
                raise
            log.warning("%s takes no weights this way, trying another: %s", client.url, error)
            await self._other.prepare(*prepared)
            await self._other.load(client, version)
            self._way = self._other

    async def put(
        self, client: SglangClient, tensors: Mapping[str, torch.Tensor], version: int
    ) -> None:
        """The way that is used now."""
        await self._way.put(client, tensors, version)


def choose_loader(
    setting: UpdateSetting,
    features: Features,
    disk: DiskLoader,
    *,
    ranks: int,
    launched: bool,
    near: bool,
    policy: str,
) -> Loader:
    """How weights reach this server: `policies.X.engine.update`, within what its release offers.

    `near`: its address is this host's. Raises `EngineStartFailed` when the setting asks for what it
    does not offer.
    """
    tensors = TensorLoader(
        ranks,
        sessions=features.sessions,
        shared=launched,
        names_version=features.version_call,
    )
    if setting == "tensor" and not features.tensors:
        raise EngineStartFailed(
            "the server takes no tensors",
            field=f"policies.{policy}.engine.update",
            value=setting,
            remedy="Use `auto` or `disk`, or a newer release.",
        )
    if setting == "disk" or not features.tensors:
        return disk
    if setting == "tensor" or launched or not near:
        return tensors
    # On this host, but perhaps in a container that does not see our files.
    return EitherLoader(disk, tensors)


def _buckets(
    items: Iterable[tuple[str, torch.Tensor]], limit: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
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


def payload(named: Any) -> str:
    """`named` (tensors by name, as pairs or a dict) by value."""
    # A view of a large file would be pickled with all of it.
    pairs = named.items() if isinstance(named, Mapping) else named
    own = [(name, tensor.detach().cpu().contiguous().clone()) for name, tensor in pairs]
    data = dict(own) if isinstance(named, Mapping) else own
    return base64.b64encode(pickle.dumps(data)).decode()


def shared_payload(named: Any) -> str:
    """The same by handles of shared memory."""
    # The default strategy passes file descriptors, which crashes SGLang's scheduler.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(named)
    return base64.b64encode(buffer.getvalue()).decode()
