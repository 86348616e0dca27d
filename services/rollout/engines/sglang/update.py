"""Weight updates of an SGLang server: how tensors get in, and the procedure that loses no turn."""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel

from services.rollout.engines.errors import BrokenReply, EngineStartFailed, Refused, UpdateFailed
from services.rollout.engines.sglang.client import Features, SglangClient, prompt_logprobs
from services.rollout.engines.verification import (
    PROOFS,
    Fingerprint,
    NamesCheck,
    Proof,
    ReferenceModel,
    buckets,
    update_failed,
)
from troupe.job import ModelSpec
from troupe.transfer import Transfer
from troupe.transfer.flat_buckets import handles
from troupe.transfer.in_place import ModelDirectory
from troupe.v1 import common_pb2 as common_pb

log = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]
UpdateSetting = Literal["auto", "tensor", "disk", "ipc", "broadcast"]

# Bytes per tensor call by handles: bounds the shared memory that one call holds.
_BUCKET_BYTES: Final = 1 << 30
# The same by value: bounds the request, which both sides hold several times.
_VALUE_BUCKET_BYTES: Final = 128 << 20
# Name of weights that nobody has verified: no version.
UNNAMED: Final = "unverified"
# A server that is full answers the probe when one of its turns has ended.
_ANSWER_SECONDS: Final = 600.0
# Aborted turns leave the server within this time.
_FLUSH_SECONDS: Final = 10.0


@dataclass(frozen=True)
class NewWeights:
    """A version that is to be loaded. `tensors`: each tensor once. `source`: where it is published
    under the key of `ref`; None if it is not published with just these tensors."""

    tensors: Mapping[str, torch.Tensor]
    ref: common_pb.WeightsRef
    source: Transfer | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Updater:
    """The update procedure of one server.

    Prepare, while it serves -> pause (turns return to the server's queue, or stay where they are
    with their cache) -> load -> flush the cache -> name the version -> continue -> compare prompt
    log-probs with a plain forward pass over the published weights. The first update also checks
    that the server takes every name (`NamesCheck`).
    """

    def __init__(
        self,
        client: SglangClient,
        features: Features,
        loader: Loader,
        model: ModelSpec,
        layout: PreTrainedModel,
        policy: str,
        *,
        keep: bool,
        keep_cache: bool = False,
    ) -> None:
        """`layout`: the model without storage. `keep`: running turns continue after the update;
        otherwise they are aborted. `keep_cache`: they continue with their keys and values."""
        self._keep = keep
        self._keep_cache = keep_cache
        self._client = client
        self._features = features
        self._loader = loader
        self.reference = ReferenceModel(layout, model.weight_dtype, policy)
        self._names = NamesCheck(self.reference, client.url, self._put, self._fingerprint)

    @property
    def way(self) -> str:
        """The way of the weights that were loaded last."""
        return self._loader.way

    @property
    def fallbacks(self) -> int:
        """Updates that were to take a direct way, and took another."""
        return self._loader.fallbacks

    async def run(
        self, weights: NewWeights, *, changed: bool, gate: Callable[[bool], None]
    ) -> float:
        """Load and verify `weights`; returns the seconds of the pause.

        `changed`: the server is known to hold other weights now. `gate(False)` has the engine hold
        its turns back, `gate(True)` send them again. Raises `UpdateFailed` and the client's errors
        other than `Refused`; the server then generates again, with unknown weights."""
        num_bytes, ref = weights.num_bytes, weights.ref
        proof, _ = await asyncio.gather(
            PROOFS.of(self.reference, weights.tensors, ref.checksum), self._loader.prepare(weights)
        )
        before = await self._client.weights_digest(num_bytes) if changed else None
        await self._loader.reserve()
        began = time.monotonic()
        gate(False)
        try:
            await self._pause()
            try:
                # Retracted turns leave the cache free at once; aborted ones take a moment.
                together = self._keep and self._features.retract and not self._keep_cache
                flushed = await self._loader.load(self._client, flush=together)
                if not (flushed or self._keep_cache):
                    await self._flush()
                if self._features.version_call:
                    await self._client.set_version(str(ref.version))
            finally:
                if self._features.pause:
                    await self._client.resume()
            paused = time.monotonic() - began
        except Refused as error:
            raise update_failed(ref, str(error)) from error
        finally:
            gate(True)
            await self._loader.release()
        await self._loader.loaded()
        try:
            await self._verify(ref, proof, before, num_bytes)
        except UpdateFailed:
            # Skipped names are the better explanation.
            await self._names.run(weights.tensors, ref)
            raise
        await self._names.run(weights.tensors, ref)
        return paused

    async def _pause(self) -> None:
        if self._keep_cache:
            await self._client.pause("in_place")
            return
        if self._features.retract:
            await self._client.pause("retract" if self._keep else "abort")
            return
        if self._features.pause:
            await self._client.pause(None)
        # Aborted turns are sent again, with their tokens so far, when the gate opens.
        await self._client.abort_all()

    async def _flush(self) -> None:
        deadline = time.monotonic() + _FLUSH_SECONDS
        while True:
            try:
                await self._client.flush_cache()
                return
            except Refused:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.05)

    async def _verify(
        self, ref: common_pb.WeightsRef, proof: Proof, before: str | None, num_bytes: int
    ) -> None:
        named = (await self._client.model_info()).get("weight_version")
        if named is not None and named != str(ref.version):
            raise update_failed(ref, f"the server says that it serves version '{named}'")
        if before is not None and await self._client.weights_digest(num_bytes) == before:
            raise update_failed(ref, "the server's own checksum of its weights did not change")
        await prove(self._client, proof, ref)

    def trust_names(self) -> None:
        """Take the names as checked: another worker has verified a version on this server."""
        self._names.trusted = True

    async def _put(self, tensors: Tensors, version: int | None) -> None:
        name = UNNAMED if version is None else str(version)
        # Workers that share the server must take no token for one of a version meanwhile.
        if self._features.version_call:
            await self._client.set_version(UNNAMED)
        await self._loader.put(self._client, tensors, name)
        await self._client.flush_cache()
        if self._features.version_call:
            await self._client.set_version(name)

    async def _fingerprint(self, num_bytes: int) -> Fingerprint:
        digest = await self._client.weights_digest(num_bytes)
        if digest is not None:
            return digest
        return await _served_logprobs(self._client, self.reference.ids, "names")


async def prove(
    client: SglangClient, proof: Proof, ref: common_pb.WeightsRef, *, adapter: str | None = None
) -> None:
    """Raise `UpdateFailed` unless the server (with `adapter`) gives the log-probs of `proof`; also
    `BrokenReply` and `ServerGone`."""
    name = adapter or f"{ref.policy}-{ref.version}"
    try:
        found = await _served_logprobs(client, proof.ids, name, adapter=adapter)
    except Refused as error:
        raise update_failed(ref, f"the probe was refused: {error}") from error
    except TimeoutError as error:
        reason = f"the probe was not answered within {_ANSWER_SECONDS:g} s"
        raise update_failed(ref, reason) from error
    proof.check(found, ref)


async def _served_logprobs(
    client: SglangClient, ids: list[int], name: str, *, adapter: str | None = None
) -> list[float]:
    """The server's log-probs of `ids[1:]`. Raises the client's errors, and TimeoutError."""
    sampling: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0.0}
    rid = f"probe-{name}-{time.monotonic_ns()}"
    async with asyncio.timeout(_ANSWER_SECONDS):
        meta = await client.generate(rid, ids, sampling, logprobs_from=0, adapter=adapter)
    got = prompt_logprobs(meta)
    if len(got) != len(ids) - 1:
        raise BrokenReply(f"{len(got)} log-probs for a probe of {len(ids)} tokens")
    return got


class Loader(ABC):
    """A way to get tensors into a paused server."""

    # Updates that were to take a direct way, and took another.
    fallbacks = 0

    @property
    @abstractmethod
    def way(self) -> str:
        """Name, in metrics, of the way that the weights prepared last take."""

    @abstractmethod
    async def prepare(self, weights: NewWeights) -> None:
        """The part that can be done while the server still serves."""

    async def reserve(self) -> None:
        """The last part before the pause: what others must wait for while it lasts."""
        return

    @abstractmethod
    async def load(self, client: SglangClient, *, flush: bool) -> bool:
        """The part that needs the server paused, with what was prepared; `flush`: forget cached
        prefixes in the same call, if that is possible. Returns whether they were forgotten. Raises
        the client's errors."""

    async def release(self) -> None:
        """Free what was reserved, whatever became of the update. Repeatable."""
        return

    @abstractmethod
    async def loaded(self) -> None:
        """After a `load` that succeeded, while the server serves again: free what it needed."""

    @abstractmethod
    async def put(self, client: SglangClient, tensors: Tensors, name: str) -> None:
        """Load some tensors over those that the server holds, and name the whole. Raises the
        client's errors."""


class DiskLoader(Loader):
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

    async def load(self, client: SglangClient, *, flush: bool) -> bool:
        """Have the server read the directory. Flushing by itself would also return memory to the
        allocator, which takes longer than the load of a small model."""
        assert self._weights is not None  # prepared
        path, version = str(self._path), str(self._weights.ref.version)
        if flush:
            try:
                await client.update_from_disk(path, version, self._num_bytes, flush=True)
                return True
            except Refused as error:  # perhaps of the flush only: the weights are in then
                log.info("%s is asked again, without a flush: %s", client.url, error)
        await client.update_from_disk(path, version, self._num_bytes)
        return False

    async def loaded(self) -> None:
        """Remove the directory. (After a failure it stays until the next version's is made: the
        server may read it again.)"""
        self._weights = None
        await asyncio.to_thread(self._remove)

    async def put(self, client: SglangClient, tensors: Tensors, name: str) -> None:
        """Write the tensors to a temporary directory and have the server read it."""
        path = self._directory / "some"
        try:
            await asyncio.to_thread(self._write, tensors, path)
            await client.update_from_disk(str(path), name, self._num_bytes)
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
    """As tensors in SGLang's encoding, a pickle (never used for our own messages).

    `ranks`: tensor-parallel size. `sessions`: between begin and end calls. `shared`: the server
    shares this machine's memory and gets handles; otherwise values. `names_version`: a call of its
    own names the version.
    """

    def __init__(self, ranks: int, *, sessions: bool, shared: bool, names_version: bool) -> None:
        self._ranks = ranks
        self._sessions = sessions
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

    async def load(self, client: SglangClient, *, flush: bool) -> bool:
        """Send the tensors bucket by bucket; nothing is flushed."""
        assert self._weights is not None  # prepared
        tensors, version = self._weights
        await self._send(client, tensors, str(version))
        return False

    async def loaded(self) -> None:
        """Let go of the tensors."""
        self._weights = None

    async def put(self, client: SglangClient, tensors: Tensors, name: str) -> None:
        """Send the tensors as in an update."""
        await self._send(client, tensors, name)

    async def _send(self, client: SglangClient, tensors: Tensors, name: str) -> None:
        encode = shared_payload if self._shared else payload
        size = _BUCKET_BYTES if self._shared else _VALUE_BUCKET_BYTES
        if self._sessions:
            await client.begin_update()
        try:
            groups = list(buckets(tensors.items(), size))
            for number, bucket in enumerate(groups, start=1):
                data = await asyncio.to_thread(for_ranks, encode, bucket, self._ranks)
                # Only with the last bucket: a server that fails half-way must not name the version.
                last = number == len(groups) and not self._names_version
                named = name if last else None
                num_bytes = sum(tensor.nbytes for _, tensor in bucket)
                await client.update_from_tensors(data, named, num_bytes)
        finally:
            if self._sessions:
                await client.end_update()


class EitherLoader(Loader):
    """The first loader; once a server has refused it, the second one."""

    def __init__(self, first: Loader, second: Loader) -> None:
        self._active, self._other = first, second
        self._prepared: NewWeights | None = None

    @property
    def way(self) -> str:
        """That of the loader in use."""
        return self._active.way

    async def prepare(self, weights: NewWeights) -> None:
        """Prepare the loader in use."""
        self._prepared = weights
        await self._active.prepare(weights)

    async def load(self, client: SglangClient, *, flush: bool) -> bool:
        """Load, by the second loader if the first is refused."""
        prepared, self._prepared = self._prepared, None
        try:
            return await self._active.load(client, flush=flush)
        except Refused as error:
            if self._other is self._active or prepared is None:
                raise
            log.warning("%s takes no weights this way, trying another: %s", client.url, error)
            await self._other.prepare(prepared)
            flushed = await self._other.load(client, flush=flush)
            await self._active.loaded()
            self._active = self._other
            return flushed

    async def loaded(self) -> None:
        """Free what the loader in use needed."""
        await self._active.loaded()

    async def put(self, client: SglangClient, tensors: Tensors, name: str) -> None:
        """By the loader in use."""
        await self._active.put(client, tensors, name)


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
    """The loader that `policies.X.engine.update` and the server's features allow.

    `launched`: by this process, with which it shares memory. `near`: its address is this host's.
    Raises `EngineStartFailed` when the setting asks for what the release lacks.
    """
    tensors = TensorLoader(
        ranks, sessions=features.sessions, shared=launched, names_version=features.version_call
    )
    needed = {"tensor": features.tensors, "ipc": features.buckets, "broadcast": features.groups}
    if not needed.get(setting, True):
        raise EngineStartFailed(
            "the server takes no weights in this way",
            field=f"policies.{policy}.engine.update",
            value=setting,
            remedy="Use `auto` or `disk`, or a newer release.",
        )
    if setting == "disk" or not features.tensors:
        return disk
    if setting == "tensor" or not near:
        return tensors
    # It reads the published file in place, unless it is in a container that does not see it.
    return EitherLoader(disk, tensors)


def for_ranks(encode: Callable[[Any], str], named: Any, ranks: int) -> list[str]:
    """The encoding of `named` for each rank of a server.

    Each rank that reads a handle gives back the reference that encoding it took: one encoding read
    by all would free the memory while later ranks, and this process, still need it."""
    if encode is payload:
        return [encode(named)] * ranks
    return [encode(named) for _ in range(ranks)]


def payload(named: Any) -> str:
    """The encoding of `named` (tensors by name, as pairs or a dict) by value."""
    # A view of a large file would be pickled with all of it.
    pairs = named.items() if isinstance(named, Mapping) else named
    own = [(name, tensor.detach().cpu().contiguous().clone()) for name, tensor in pairs]
    data = dict(own) if isinstance(named, Mapping) else own
    return base64.b64encode(pickle.dumps(data)).decode()


def shared_payload(named: Any) -> str:
    """The encoding of `named` by handles of shared memory."""
    return base64.b64encode(handles(named)).decode()
