"""Ways to get published tensors into a server, and the proof that they arrived."""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from services.rollout.engines.models import skeleton
from services.rollout.engines.sglang.client import SglangClient

Updates = Literal["disk", "tensor"]

# Bytes per tensor call: bounds the shared memory that one call holds.
_BUCKET_BYTES: Final = 1 << 30
# The newest versions on disk: a server may still read the one before.
_KEEP: Final = 2
# Prompt of the proof: long enough that every layer matters, short enough for a CPU forward pass.
_PROBE_TOKENS: Final = 16
# Largest difference of a prompt log-prob between the server and a plain forward pass of the same
# weights. float32 agrees to 1e-5; bfloat16 rounds to 3 digits, and kernels round differently.
TOLERANCE: Final = {"float32": 2e-3, "bfloat16": 0.5}
# Above this, reading all weights once for the proof would take seconds.
PROBE_BYTES: Final = 16 << 30


class Loader(Protocol):
    """Puts tensors into a paused server."""

    async def prepare(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """What can be done while the server still serves."""
        ...

    async def load(self, client: SglangClient, version: int) -> None:
        """What needs it paused. Raises the client's errors."""
        ...


class DiskLoader:
    """Through safetensors in a directory that the server sees; in shared memory by default."""

    def __init__(self, directory: Path, config: PretrainedConfig) -> None:
        self._directory = directory
        self._config = config

    async def prepare(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Write the version's directory."""
        await asyncio.to_thread(self._write, tensors, version)

    async def load(self, client: SglangClient, version: int) -> None:
        """Have the server read it; versions before the last two are deleted."""
        await client.update_from_disk(str(self._path(version)), str(version))
        old = sorted(self._directory.glob("v*"), key=lambda path: path.stat().st_mtime)
        for path in old[:-_KEEP]:
            shutil.rmtree(path, ignore_errors=True)

    def _path(self, version: int) -> Path:
        return self._directory / f"v{version}"

    def _write(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        path = self._path(version)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        self._config.save_pretrained(path)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path / "model.safetensors",
            metadata={"format": "pt"},
        )


class TensorLoader:
    """Through handles of shared memory, in SGLang's own encoding, which is a pickle.

    Only for servers on this machine. Never used for Troupe's own messages.
    """

    def __init__(self, ranks: int, sessions: bool) -> None:
        self._ranks = ranks
        self._sessions = sessions
        self._tensors: Mapping[str, torch.Tensor] = {}

    async def prepare(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Nothing can be done before the pause."""
        self._tensors = tensors

    async def load(self, client: SglangClient, version: int) -> None:
        """Bucket by bucket, within a session where the server wants one."""
        if self._sessions:
            await client.begin_update()
        try:
            for bucket in _buckets(self._tensors.items()):
                payload = await asyncio.to_thread(_shared, bucket)
                await client.update_from_tensors([payload] * self._ranks, str(version))
        finally:
            self._tensors = {}
            if self._sessions:
                await client.end_update()


def probe_ids(vocabulary: int, room: int) -> list[int]:
    """A fixed prompt that spreads over the vocabulary."""
    return [(7919 * i + 3) % vocabulary for i in range(min(_PROBE_TOKENS, room))]


def expected_logprobs(
    tensors: Mapping[str, torch.Tensor],
    config: PretrainedConfig,
    dtype: str,
    policy: str,
    ids: list[int],
) -> list[float]:
    """Log-probs of `ids[1:]` by a plain forward pass over `tensors`, without copying them."""
    model = skeleton(config, dtype, policy)
    model.load_state_dict(dict(tensors), strict=False, assign=True)
    model.tie_weights()
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    table = torch.log_softmax(logits, dim=-1)
    chosen: list[float] = table.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()
    return chosen


def _buckets(
    items: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in items:
        if bucket and size + tensor.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _shared(bucket: list[tuple[str, Any]]) -> str:
    # The default strategy passes file descriptors, which crashes SGLang's scheduler.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(bucket)
    return base64.b64encode(buffer.getvalue()).decode()
