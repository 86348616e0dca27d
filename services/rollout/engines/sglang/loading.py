"""Ways to get published tensors into a server."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import pickle
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel

from services.rollout.engines.base import EngineStartFailed, UpdateFailed
from services.rollout.engines.sglang.client import (
    BrokenReply,
    Refused,
    SglangClient,
    prompt_logprobs,
)
from services.rollout.engines.sglang.features import Features
from services.rollout.engines.weights import skeleton
from troupe.checkpoints.format import ModelArrangement
from troupe.transfer import DeferredTensors
from troupe.v1 import common_pb2 as pb

# Prompt of the proof: long enough that every layer matters, short enough for a CPU forward pass.
_PROBE_TOKENS: Final = 16
# Largest difference of a prompt log-prob between the server and a plain forward pass of the same
# weights. float32 agrees to 1e-5; bfloat16 rounds to 3 digits, and kernels round differently.
_TOLERANCE: Final = {"float32": 2e-3, "bfloat16": 0.5}
# A server that is full answers the probe when one of its turns has ended.
_ANSWER_SECONDS: Final = 600.0


@dataclass(frozen=True)
class Proof:
    """A prompt, and what a plain forward pass over weights says of it."""

    ids: list[int]
    # Log-probs of `ids[1:]`.
    wanted: list[float]
    allowed: float

    async def check(
        self, client: SglangClient, ref: pb.WeightsRef, *, adapter: str | None = None
    ) -> None:
        """Raise `UpdateFailed` unless the server (with `adapter`) says the same; `BrokenReply` and
        `ServerGone`."""
        name = adapter or f"{ref.policy}-{ref.version}"
        try:
            got = await served_logprobs(client, self.ids, name, adapter=adapter)
        except Refused as error:
            raise update_failed(ref, f"the probe was refused: {error}") from error
        except TimeoutError as error:
            reason = f"the probe was not answered within {_ANSWER_SECONDS:g} s"
            raise update_failed(ref, reason) from error
        worst = largest_difference(got, self.wanted)
        if not worst <= self.allowed:
            raise update_failed(
                ref,
                f"prompt log-probs differ by {worst:.3g} from those of the published weights "
                f"(allowed: {self.allowed:g})",
            )


class Plain:
    """Computes with transformers, on the CPU, what a server of a model says of a fixed prompt."""

    def __init__(self, layout: PreTrainedModel, dtype: str, policy: str) -> None:
        """`layout`: the policy's model without weights, in `dtype`."""
        self._layout, self._dtype, self._policy = layout, dtype, policy
        text = layout.config.get_text_config()
        room = getattr(text, "max_position_embeddings", 64) // 2
        # They spread over the vocabulary.
        self.ids = [(7919 * i + 3) % text.vocab_size for i in range(min(_PROBE_TOKENS, room))]

    def proof(self, tensors: DeferredTensors) -> Proof:
        """Of `tensors`, by the names of the model itself. Blocking: all of them are read once."""
        return Proof(self.ids, self._forward(tensors), _TOLERANCE[self._dtype])

    def logprobs(self, published: Mapping[str, torch.Tensor]) -> list[float]:
        """Log-probs of the prompt after its first token, by published tensors, which fit."""
        return self._forward(self.in_model(published))

    def in_model(self, published: Mapping[str, torch.Tensor]) -> DeferredTensors:
        """Published tensors, which fit, by the names of the model itself."""
        return ModelArrangement.of(self._layout, published).arranged(published)

    def _forward(self, tensors: DeferredTensors) -> list[float]:
        """Each layer gets its weights when it is reached, and gives them back."""
        model = skeleton(self._layout.config, self._dtype, self._policy)
        if getattr(model.config, "_experts_implementation", None) is not None:
            # Others read every expert; a few are asked.
            model.set_experts_implementation("eager")
        by_layer: dict[str, list[int]] = {}
        for number, group in enumerate(tensors.groups):
            layers = {_layer_of(model, name) for name in group.layout}
            layer = layers.pop() if len(layers) == 1 else ""
            by_layer.setdefault(layer, []).append(number)
        slots = model.state_dict(keep_vars=True)
        for number in by_layer.pop("", []):
            _give(slots, tensors.made(number))
        for layer, numbers in by_layer.items():
            _lend(slots, model.get_submodule(layer), tensors, numbers)
        with torch.no_grad():
            logits = model(torch.tensor([self.ids]), use_cache=False).logits[0, :-1].float()
        table = torch.log_softmax(logits, dim=-1)
        said = torch.tensor(self.ids[1:]).unsqueeze(1)
        found: list[float] = table.gather(1, said).squeeze(1).tolist()
        return found


async def served_logprobs(
    client: SglangClient, ids: list[int], name: str, *, adapter: str | None = None
) -> list[float]:
    """What the server says of `ids[1:]`. Raises the client's errors, and TimeoutError."""
    sampling: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0.0}
    rid = f"probe-{name}-{time.monotonic_ns()}"
    async with asyncio.timeout(_ANSWER_SECONDS):
        meta = await client.generate(rid, ids, sampling, logprobs_from=0, adapter=adapter)
    got = prompt_logprobs(meta)
    if len(got) != len(ids) - 1:
        raise BrokenReply(f"{len(got)} log-probs for a probe of {len(ids)} tokens")
    return got


def largest_difference(these: list[float], those: list[float]) -> float:
    """Of log-probs of the same tokens; NaN where one of them is no number."""
    return float((torch.tensor(these) - torch.tensor(those)).abs().max())


def _layer_of(model: PreTrainedModel, name: str) -> str:
    """The module that a parameter is in and that is one of a list; empty: of none."""
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if part.isdigit() and isinstance(
            model.get_submodule(".".join(parts[:at])), torch.nn.ModuleList
        ):
            return ".".join(parts[: at + 1])
    return ""


def _lend(
    slots: Mapping[str, torch.Tensor],
    layer: torch.nn.Module,
    tensors: DeferredTensors,
    numbers: list[int],
) -> None:
    """Have `layer` its weights while it computes."""
    names = [name for number in numbers for name in tensors.groups[number].layout]
    before = {name: slots[name].data for name in names}

    def come(*_: Any) -> None:
        for number in numbers:
            _give(slots, tensors.made(number))

    def go(*_: Any) -> None:
        _give(slots, before)

    layer.register_forward_pre_hook(come)
    layer.register_forward_hook(go, always_call=True)


def _give(slots: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        slots[name].data = tensor


def update_failed(
    ref: pb.WeightsRef,
    reason: str,
    *,
    remedy: str = "Repeat the update; if it fails again restart the engine.",
) -> UpdateFailed:
    """The error of an update that did not get into the server."""
    return UpdateFailed(
        f"version {ref.version} did not get into the server: {reason}",
        field="weights",
        value=ref.key,
        remedy=remedy,
    )


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
