"""`InferenceServer`: what a kind of inference server (SGLang, ...) offers to engines.

A kind is a package with a subclass of `InferenceServer`. Everything else about an engine that is a
server is shared (`services.rollout.engines.servers`): turns, updates with their proof, adapters,
sleep, health, launching and attaching.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import torch

from services.rollout.engines.errors import BrokenReply, Refused, ServerGone
from troupe.checkpoints.adapters import AdapterContent
from troupe.job import PolicySpec
from troupe.job.engines import KINDS
from troupe.mixtures import Indices, RoutingShape
from troupe.v1 import trainer_pb2 as trainer_pb

if TYPE_CHECKING:
    from services.rollout.engines.turns import EngineTurn

Way = Literal["directory", "tensors", "ipc", "broadcast"]
"""How a server can take weights. `directory`: it reads a model directory that it sees. `tensors`:
in requests, by value or by handles of shared memory. `ipc`: by handles of the trainer's device
memory. `broadcast`: in a process group with the trainer."""

RunningTurns = Literal["requeue", "abort", "keep"]
"""Fate of running turns in a pause. `requeue`: they go back to the server's queue, without
their cache. `abort`: they end. `keep`: they stay where they are, with their cache."""

LaunchFeature = Literal["deterministic", "routed_experts", "memory", "adapters", "slots"]
"""Features that a server has only if it was started for them."""


# Versions of a policy that may be live at once: the served one, and former ones whose turns run.
LIVE_VERSIONS: Final = 3


@dataclass(frozen=True)
class AdapterNeeds:
    """LoRA adapters of the policies on one server: the largest `rank`, all `modules` that one of
    them changes (last parts of names), and the number of `policies`."""

    rank: int
    modules: Sequence[str]
    policies: int = 1

    @property
    def per_batch(self) -> int:
        """Adapters of one batch, with none (the base) as another one."""
        return LIVE_VERSIONS * self.policies + 1


@dataclass(frozen=True)
class Launch:
    """How a server is launched, on loopback.

    `source`: a directory or hub id of the model; weights are loaded later. `name`: the served
    model name. `adapters`: its policies', if any. `replica`: the host's number.
    `memory`: the server can free its GPU memory while it runs. `routed_experts`: it says which
    experts tokens were sent to. `release`: numbers of its package's version; empty: unknown.
    `gpu`: it computes on GPUs.
    """

    spec: PolicySpec
    source: str
    port: int
    max_context: int
    name: str = ""
    adapters: AdapterNeeds | None = None
    replica: int = 0
    deterministic: bool = False
    memory: bool = False
    routed_experts: bool = False
    release: tuple[int, ...] = ()
    gpu: bool = False

    @property
    def interpreter(self) -> str:
        """The Python of the environment that has the server."""
        engine = self.spec.engine
        return KINDS[engine.kind].interpreter(engine.python)

    @property
    def extra_arguments(self) -> list[str]:
        """The job's own `engine.launch` arguments, in which `{replica}` and `{port}` are
        replaced. They come last in a command and win."""
        return [
            part.replace("{replica}", str(self.replica)).replace("{port}", str(self.port))
            for part in self.spec.engine.launch
        ]


@dataclass(frozen=True)
class AdapterLimits:
    """Adapters that a server was started for; `rank` or `slots` None, no `modules`: it does not
    say. `slots`: adapters that it computes in one batch; no adapter needs no slot."""

    rank: int | None = None
    modules: Collection[str] = ()
    slots: int | None = None


@dataclass(frozen=True)
class ServerDescription:
    """A running server as it describes itself.

    `ways`: how it takes weights. `pauses`: it can be paused while it loads them. `keeps_cache`: a
    pause can leave turns with their cache, and turns of different versions share no prefix.
    `names_versions`: a call by itself names the loaded version, without aborting turns.
    `frees_memory`: it can release weights and cache while it runs. `takes_adapters`: adapters can
    be loaded while it runs; `adapters`: those that it was started for, None for none.
    `deterministic`, `routed_experts`: it was started for them. `ranks`: tensor-parallel size.
    `device`: what it computes on ("cuda"), empty if it does not say. `context`: tokens of prompt
    and response that it takes. None: it does not say.
    """

    ways: frozenset[Way]
    pauses: bool = True
    keeps_cache: bool = False
    names_versions: bool = True
    frees_memory: bool = False
    takes_adapters: bool = False
    adapters: AdapterLimits | None = None
    deterministic: bool = False
    routed_experts: bool = False
    ranks: int = 1
    device: str = ""
    context: int | None = None
    model_type: str | None = None
    vocabulary: int | None = None


@dataclass(frozen=True)
class ServerLoad:
    """A server's load report, over all its clients; 0 where it lacks a number.

    `uncached_tokens`: prompt tokens of waiting requests that no cached prefix covers. `kv_usage`
    and `cache_hit_rate`: fractions.
    """

    running: int = 0
    waiting: int = 0
    uncached_tokens: int = 0
    kv_usage: float = 0.0
    cache_hit_rate: float = 0.0


@dataclass(frozen=True)
class VersionName:
    """Tokens [start, end) of a reply were drawn by weights that had this name."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class ServerReply:
    """A server's answer to a turn.

    `token_ids` and `logprobs` have equal length. `spans`: names of the weights that drew them;
    empty if the server does not say. `last_name`: of the weights that were loaded at the end, None
    if unknown. `aborted`: it ended early, and `message` says why. `routes`: see `EngineTurn`.
    """

    token_ids: list[int]
    logprobs: list[float]
    aborted: bool
    message: str = ""
    cached_tokens: int = 0
    spans: Sequence[VersionName] = ()
    last_name: str | None = None
    routes: Indices | None = None

    def is_over(self, base: int | None) -> bool:
        """Return whether the weights that drew it, under an adapter or alone, have the name of the
        base; True if the server does not say."""
        if not self.spans:
            return self.last_name in (None, str(base))
        return all(span.name == str(base) for span in self.spans)

    def versions(
        self, asked_of: int | None, *, steady: bool, adapter: int | None = None
    ) -> list[int] | None:
        """The version that drew each token; None when it changed at an unknown token.

        `asked_of`: the version in the server when the turn was sent; `steady`: no update has begun
        since. `adapter`: the version of the adapter that drew every token, whatever the server
        calls the weights under it. Raises `BrokenReply`.
        """
        count = len(self.token_ids)
        if adapter is not None:
            return [adapter] * count
        if self.spans:
            found: list[int] = []
            for span in self.spans:
                if span.start != len(found) or not span.name.isdecimal():
                    raise BrokenReply(f"version spans do not join at token {len(found)}")
                found += [int(span.name)] * (span.end - span.start)
            if len(found) != count:
                raise BrokenReply(f"{count} tokens, but versions of {len(found)}")
            return found
        named = self.last_name
        unchanged = named == str(asked_of) if named and named.isdecimal() else steady
        if count == 0 or (unchanged and asked_of is not None):
            return [asked_of or 0] * count
        return None

    def with_routes(self, routes: Indices, shape: RoutingShape, tokens: int) -> ServerReply:
        """The reply with the experts that the first `tokens` - 1 of prompt and response were sent
        to, of all layers, in any shape of so many numbers. Raises `BrokenReply`."""
        try:
            found = shape.compact(routes.reshape(-1, shape.layers, shape.top_k))
        except ValueError as error:
            raise BrokenReply(f"it does not say which experts it used: {error!r}") from error
        if problem := shape.problem(found, tokens):
            raise BrokenReply(problem)
        return replace(self, routes=found)


def logprobs_of(values: Iterable[float | None]) -> list[float]:
    """Log-probs; JSON has no NaN, so servers write null where broken weights compute it."""
    return [math.nan if value is None else float(value) for value in values]


class Unfit(Exception):
    """A server cannot serve any policy as it was started."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


class InferenceServer(ABC):
    """A running server at `url`.

    Every method raises `ServerGone`, `BrokenReply` or `Refused` unless it says otherwise. Methods
    wait as long as the server may need; `generate` waits until its caller's deadline cancels it.
    Methods for abilities that the server lacks by `describe` are not called, and need no
    implementation.
    """

    product: ClassVar[str]
    """The name of the software, for people."""
    oldest: ClassVar[str]
    """The oldest release that can be used."""
    options: ClassVar[Mapping[LaunchFeature, str]]
    """Arguments that a server must be started with, for messages."""
    name_option: ClassVar[str]
    """The argument of the served model name."""
    bucket_format: ClassVar[str] = ""
    """How the trainer encodes tensors for `ipc` and joins groups for `broadcast`: a name in
    `troupe.transfer.formats`."""
    group_packages: ClassVar[Collection[str]] = ("torch", "NCCL")
    """Packages whose versions the trainer must share to form process groups with it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @classmethod
    @abstractmethod
    def command(cls, launch: Launch) -> list[str]:
        """The command line of a server that has random weights, or none, until the first update."""

    @classmethod
    def variables(cls, launch: Launch) -> Mapping[str, str]:
        """Environment variables of a launched server, unless the worker's environment sets them."""
        del launch
        return {}

    @classmethod
    @abstractmethod
    def adapter_arguments(cls, needs: AdapterNeeds) -> list[str]:
        """Arguments of a server that serves such adapters."""

    @abstractmethod
    async def close(self) -> None:
        """Drop all connections. Never raises."""

    # What it is, and whether it works.

    @abstractmethod
    async def describe(self) -> ServerDescription:
        """Read what the server can do from its own documents. Raises also `Unfit`."""

    @abstractmethod
    async def alive(self) -> bool:
        """Whether the server answers at all (a paused one does). Never raises."""

    @abstractmethod
    async def healthy(self) -> bool:
        """Whether the server says that it can generate; a paused one cannot. Never raises."""

    @abstractmethod
    async def probe(self) -> bool:
        """Whether an ordinary request gets its token. Never raises."""

    @abstractmethod
    async def load(self) -> ServerLoad:
        """The server's load; zeros where it does not report any."""

    async def served_name(self) -> str | None:
        """The served model name; None if the server does not say."""
        return None

    async def tokenize(self, text: str) -> list[int] | None:
        """Ids of `text` by the server's tokenizer, without special tokens; None if it has none."""
        return None

    # Turns. `adapter`: name of a loaded adapter. `cache_key`: a request shares cached prefixes only
    # with requests of the same key.

    @abstractmethod
    async def generate(
        self,
        turn: EngineTurn,
        *,
        adapter: str | None = None,
        routing: RoutingShape | None = None,
        cache_key: str | None = None,
    ) -> ServerReply:
        """Generate the rest of `turn`, under its `key`: it may have tokens already. `routing`: also
        say which experts tokens were sent to."""

    @abstractmethod
    async def score(
        self,
        key: str,
        ids: Sequence[int],
        start: int,
        *,
        adapter: str | None = None,
        cache_key: str | None = None,
    ) -> list[float]:
        """Log-probs at temperature 1 of `ids` after position `start`."""

    @abstractmethod
    async def abort(self, key: str) -> None:
        """End one request, whose `generate` returns the tokens so far. Unknown keys are ignored."""

    # Weights. A server that loads in several calls is between `begin_update` and `end_update`.

    @abstractmethod
    async def pause(self, turns: RunningTurns) -> bool:
        """Stop generating. A server that cannot requeue turns aborts them. Returns whether the
        cache can be flushed at once: aborted turns leave it a moment later."""

    @abstractmethod
    async def resume(self) -> None:
        """Generate again. Does nothing where the server cannot pause."""

    @abstractmethod
    async def flush_cache(self) -> None:
        """Forget all cached prefixes. Refused while something runs."""

    @abstractmethod
    async def version(self) -> str | None:
        """The name of the loaded weights; None if the server does not say."""

    @abstractmethod
    async def set_version(self, name: str) -> None:
        """Name the loaded weights, without aborting turns (`ServerDescription.names_versions`)."""

    async def weights_digest(self, num_bytes: int) -> str | None:
        """The server's own checksum of its weights, of `num_bytes`; None if it computes none."""
        return None

    async def begin_update(self) -> None:
        """Begin to load weights by several calls."""
        return

    async def end_update(self) -> None:
        """End it, also after a client that died in the middle of an update."""
        return

    @contextlib.asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Several calls that load weights."""
        await self.begin_update()
        try:
            yield
        except BaseException:
            with contextlib.suppress(*SERVER_ERRORS):  # servers may have ended it, and say so
                await self.end_update()
            raise
        await self.end_update()

    @abstractmethod
    async def load_directory(self, path: str, name: str, num_bytes: int, *, flush: bool) -> None:
        """Load the safetensors, of `num_bytes`, of a directory that the server sees, and name the
        weights. `flush`: then forget cached prefixes; refused, after the load, while something
        runs."""

    async def load_tensors(
        self, tensors: Sequence[tuple[str, torch.Tensor]], name: str | None, *, shared: bool
    ) -> None:
        """Load some tensors in one request. `shared`: by handles, to a server that shares this
        process's memory; else by value. `name`: then name the weights; None leaves the name."""
        raise NotImplementedError

    async def join_group(self, group: trainer_pb.UpdateGroup) -> None:
        """Join a process group with the trainer, whose rank 0 waits there."""
        raise NotImplementedError

    async def leave_group(self, name: str) -> None:
        """Leave a process group."""
        raise NotImplementedError

    async def load_handles(self, bucket: trainer_pb.WeightBucket, num_bytes: int) -> None:
        """Load a bucket of `num_bytes` by the handles that the trainer made for each rank."""
        raise NotImplementedError

    async def load_broadcast(
        self, group: str, bucket: trainer_pb.WeightBucket, num_bytes: int
    ) -> None:
        """Load a bucket of `num_bytes` that the trainer broadcasts in the group."""
        raise NotImplementedError

    async def load_adapter(self, name: str, content: AdapterContent, *, shared: bool) -> None:
        """Load a LoRA adapter. `shared`: the server shares this process's memory."""
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter, once no request uses it."""
        raise NotImplementedError

    # Memory.

    async def release_memory(self, tags: Collection[str]) -> None:
        """Free weights, key-value cache or both. The server is idle."""
        raise NotImplementedError

    async def resume_memory(self, tags: Collection[str]) -> None:
        """Allocate the memory again; its contents are undefined."""
        raise NotImplementedError


SERVER_ERRORS: Final = (ServerGone, BrokenReply, Refused)
"""Errors that the methods of `InferenceServer` raise."""
