"""Weight updates of a server: the procedure that loses no turn, and the proof of its result."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

from transformers import PretrainedConfig

from services.rollout.engines.errors import Refused, UpdateFailed
from services.rollout.engines.requests import LoadedAhead
from services.rollout.engines.servers.interface import (
    InferenceServer,
    RunningTurns,
    ServerDescription,
)
from services.rollout.engines.servers.loaders import Loader, NewWeights, Tensors
from services.rollout.engines.servers.verification import (
    Fingerprint,
    LocalProofs,
    NamesCheck,
    update_failed,
)
from troupe.checkpoints.adapters import AdapterContent
from troupe.checkpoints.proof import Proof, ProofFailed
from troupe.v1 import common_pb2 as common_pb

log = logging.getLogger(__name__)

# Name of weights that nobody has verified: no version.
UNNAMED: Final = "unverified"
# A server that is full answers the probe when one of its turns has ended.
_ANSWER_SECONDS: Final = 600.0
# Aborted turns leave the server within this time.
_FLUSH_SECONDS: Final = 10.0


class Updater:
    """The update procedure of one server.

    Prepare, while it serves -> pause (turns return to the server's queue, or stay where they are
    with their cache) -> load -> flush the cache -> name the version -> continue -> compare prompt
    log-probs with the version's proof. The first update also checks that the server takes every
    name (`NamesCheck`).
    """

    def __init__(
        self,
        server: InferenceServer,
        described: ServerDescription,
        loader: Loader,
        config: PretrainedConfig,
        max_context: int,
        *,
        keep: bool,
        keep_cache: bool = False,
    ) -> None:
        """`config`: of the policy's model. `max_context`: tokens of a turn. `keep`: running
        turns continue after the update; otherwise they are aborted. `keep_cache`: they continue
        with their keys and values."""
        self._keep = keep
        self._keep_cache = keep_cache
        self._server = server
        self._described = described
        self._loader = loader
        self._max_context = max_context
        self._local = LocalProofs(config)
        self._names = NamesCheck(self._local, server.url, self._put, self._fingerprint)

    @property
    def way(self) -> str:
        """The way of the weights that were loaded last."""
        return self._loader.way

    def takes_from_trainer(self, ref: common_pb.WeightsRef) -> bool:
        """Return whether the server would load `ref` from the device of its trainer."""
        return self._loader.takes_from_trainer(ref)

    @property
    def fallbacks(self) -> int:
        """Updates that were to take a direct way, and took another."""
        return self._loader.fallbacks

    async def run(
        self, weights: NewWeights, *, changed: bool, gate: Callable[[bool], None]
    ) -> float:
        """Load and verify `weights`; returns the seconds of the pause.

        `changed`: the server is known to hold other weights now. `gate(False)` has the engine hold
        its turns back, `gate(True)` send them again. Raises `UpdateFailed` and the server's errors
        other than `Refused`; the server then generates again, with unknown weights."""
        num_bytes, ref = weights.num_bytes, weights.ref
        proof, _ = await asyncio.gather(
            self.proof_of(ref, weights.tensors), self._loader.prepare(weights)
        )
        before = await self._server.weights_digest(num_bytes) if changed else None
        await self._loader.reserve()

        async def load(emptied: bool) -> bool:
            return await self._loader.load(self._server, flush=emptied)

        paused = await self._exchange(ref, load, gate)
        await self._loader.loaded()
        try:
            await self._verify(ref, proof, before, num_bytes)
        except UpdateFailed:
            # Skipped names are the better explanation.
            await self._names.run(weights.tensors, ref)
            raise
        await self._names.run(weights.tensors, ref)
        return paused

    async def load_ahead(
        self, weights: NewWeights, *, starting: Callable[[], None], gate: Callable[[bool], None]
    ) -> LoadedAhead | None:
        """Load weights before their commit, without a proof; None if the trainer does not send
        them.

        `starting` is called before anything changes; `gate`, errors: see `run`."""
        if not await self._loader.reserve_ahead(weights):
            return None

        async def load(emptied: bool) -> bool:
            await self._loader.load_ahead()
            return False

        try:
            digest = await self._server.weights_digest(weights.num_bytes)
        except BaseException:
            await self._loader.release()
            raise
        starting()
        return LoadedAhead(digest, await self._exchange(weights.ref, load, gate))

    async def verify_ahead(
        self, ref: common_pb.WeightsRef, loaded: LoadedAhead, num_bytes: int
    ) -> None:
        """Raise `UpdateFailed` unless what was loaded before its commit is `ref`; also the server's
        errors."""
        if (proof := Proof.of(ref)) is None:
            raise update_failed(ref, "it was committed without a proof")
        await self._verify(ref, proof.within(self._max_context), loaded.digest, num_bytes)

    async def _exchange(
        self,
        ref: common_pb.WeightsRef,
        load: Callable[[bool], Awaitable[bool]],
        gate: Callable[[bool], None],
    ) -> float:
        """Pause, `load`, name the version and continue; returns the seconds of the pause. `load` is
        told whether the cache can be flushed at once, and returns whether it was."""
        began = time.monotonic()
        gate(False)
        try:
            emptied = await self._server.pause(self._turns)
            try:
                flushed = await load(emptied)
                if not (flushed or self._keep_cache):
                    await self._flush()
                if self._described.names_versions:
                    await self._server.set_version(str(ref.version))
            finally:
                await self._server.resume()
            return time.monotonic() - began
        except Refused as error:
            raise update_failed(ref, str(error)) from error
        finally:
            gate(True)
            await self._loader.release()

    def knows_names(self, names: Collection[str]) -> bool:
        """Return whether the server is known to take tensors of these names."""
        return self._names.knows(names)

    async def proof_of(
        self, ref: common_pb.WeightsRef, tensors: Tensors, adapter: AdapterContent | None = None
    ) -> Proof:
        """The proof of a version: the one that came with it, else by `tensors`, with an `adapter`
        over them. Raises `MergeMismatch`."""
        proof = Proof.of(ref)
        if proof is None:
            log.info("version %d came without a proof: it is computed here", ref.version)
            proof = await self._local.of(tensors, ref.checksum, adapter)
        return proof.within(self._max_context)

    @property
    def _turns(self) -> RunningTurns:
        """Fate of running turns in the pause."""
        if self._keep_cache:
            return "keep"
        return "requeue" if self._keep else "abort"

    async def _flush(self) -> None:
        deadline = time.monotonic() + _FLUSH_SECONDS
        while True:
            try:
                await self._server.flush_cache()
                return
            except Refused:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.05)

    async def _verify(
        self, ref: common_pb.WeightsRef, proof: Proof, before: str | None, num_bytes: int
    ) -> None:
        named = await self._server.version()
        if named is not None and named != str(ref.version):
            raise update_failed(ref, f"the server says that it serves version '{named}'")
        if before is not None and await self._server.weights_digest(num_bytes) == before:
            raise update_failed(ref, "the server's own checksum of its weights did not change")
        await prove(self._server, proof, ref)

    def trust_names(self) -> None:
        """Take the names as checked: another worker has verified a version on this server."""
        self._names.trusted = True

    async def _put(self, tensors: Tensors, version: int | None) -> None:
        name = UNNAMED if version is None else str(version)
        # Workers that share the server must take no token for one of a version meanwhile.
        if self._described.names_versions:
            await self._server.set_version(UNNAMED)
        await self._loader.put(self._server, tensors, name)
        await self._server.flush_cache()
        if self._described.names_versions:
            await self._server.set_version(name)

    async def _fingerprint(self, num_bytes: int) -> Fingerprint:
        digest = await self._server.weights_digest(num_bytes)
        if digest is not None:
            return digest
        return await _served_logprobs(self._server, self._local.ids, "names")


async def prove(
    server: InferenceServer,
    proof: Proof,
    ref: common_pb.WeightsRef,
    *,
    adapter: str | None = None,
) -> None:
    """Raise `UpdateFailed` unless the server (with `adapter`) gives the log-probs of `proof`; also
    `BrokenReply` and `ServerGone`."""
    name = adapter or f"{ref.policy}-{ref.version}"
    try:
        found = await _served_logprobs(server, proof.ids, name, adapter=adapter)
    except Refused as error:
        raise update_failed(ref, f"the probe was refused: {error}") from error
    except TimeoutError as error:
        reason = f"the probe was not answered within {_ANSWER_SECONDS:g} s"
        raise update_failed(ref, reason) from error
    try:
        proof.check(found)
    except ProofFailed as error:
        raise update_failed(ref, str(error)) from error


async def _served_logprobs(
    server: InferenceServer, ids: Sequence[int], name: str, *, adapter: str | None = None
) -> list[float]:
    """The server's log-probs of `ids[1:]`. Raises the server's errors, and TimeoutError."""
    key = f"probe-{name}-{time.monotonic_ns()}"
    async with asyncio.timeout(_ANSWER_SECONDS):
        return await server.score(key, ids, 0, adapter=adapter)
