"""`EmbeddedHost`: one model of the rollout process under the engines of one or several policies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final, Protocol

import torch
from transformers import PreTrainedModel

from services.rollout.engines.base import Tensors
from services.rollout.engines.embedded.attention import check_attention
from services.rollout.engines.embedded.batcher import SlotBatcher, default_room
from services.rollout.engines.errors import (
    EngineDied,
    EngineStartFailed,
)
from services.rollout.engines.hosts import EngineHost
from services.rollout.engines.requests import Memory
from services.rollout.engines.server_process import EngineDevices
from services.rollout.engines.weights import (
    BaseWeights,
    adopt,
    arranged,
    load_config,
    other_base,
    skeleton,
    verify,
)
from troupe.checkpoints.adapters import linear_layers
from troupe.job import PolicySpec
from troupe.mixtures import Routers, is_mixture
from troupe.scheduling.defaults import context_of
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.languages import end_ids, positions_of

log = logging.getLogger(__name__)

# A step takes milliseconds to seconds. One that takes this long is stuck.
STALL_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 5.0


class HostedEngine(Protocol):
    """An engine, as its host sees it."""

    engine_id: str
    policy: str

    @property
    def message(self) -> str:
        """Why it is in its state."""

    @property
    def turns(self) -> int:
        """Number of its turns in flight."""

    def require_wanted(self) -> None:
        """Raise `EngineDied` if it was stopped while it started."""

    def died(self, reason: str) -> None:
        """Be dead, as the model is. Repeatable."""


class EmbeddedHost(EngineHost):
    """Host of embedded engines: one model and its batcher, for one or several policies.

    The model's own weights change between two passes; keys and values of running turns are computed
    again. Adapters over them are loaded next to each other, and a turn ends with the one that it
    began with. Engines of several policies have adapters, or the bare base, which is loaded once.

    The first engine that starts brings the model up, and the last one that stops releases it. A
    death ends the engines of all policies; each restarts itself."""

    def __init__(
        self,
        host_id: str,
        specs: Mapping[str, PolicySpec],
        engine_class: Callable[..., Any],
        *,
        threads: int = 1,
        deterministic: bool = False,
        device: str = "cpu",
        devices: EngineDevices | None = None,
        routed_experts: bool = False,
    ) -> None:
        """`specs`: by policy, in the job's order, of one base and with equal `engine` sections.
        The others: see `EmbeddedEngine`."""
        super().__init__(host_id, specs, engine_class, host=self)
        self._policy, self._spec = next(iter(self.specs.items()))
        self._threads = threads
        self._deterministic = deterministic
        self._where = device
        self._routed_experts = routed_experts
        self._devices = devices or EngineDevices()
        self.model: PreTrainedModel | None = None
        self.batcher: SlotBatcher | None = None
        self.max_context = 0
        self.vocabulary = 0
        self.eos_ids: frozenset[int] = frozenset()
        # The model's own weights; None until they are loaded.
        self.base: BaseWeights | None = None
        # Engines that have started and not stopped, with the memory that each has released; those
        # that serve `base`, or adapters over it; and the one that brings the model up.
        self._engines: dict[HostedEngine, frozenset[Memory]] = {}
        self._users: set[HostedEngine] = set()
        self._launching: HostedEngine | None = None
        self.progress_at = time.monotonic()
        # Serializes starts, sleep, and loads of the model's own weights.
        self._changing = asyncio.Lock()

    @property
    def held_devices(self) -> frozenset[int]:
        """Indices of the worker's devices that the model is on."""
        return self._devices.held(self.host_id)

    @property
    def is_up(self) -> bool:
        """Whether the batcher runs."""
        return self.batcher is not None and self.batcher.alive

    @property
    def turns(self) -> int:
        """Turns in flight, of all engines."""
        return sum(engine.turns for engine in self._engines)

    async def join(self, engine: HostedEngine) -> None:
        """Take in an engine that starts or wakes, and bring the model up unless it is. Raises
        `EngineStartFailed`."""
        async with self._changing:
            if not self.is_up:
                self._drop_batcher()
                self._launching = engine
                try:
                    await self._launch(engine)
                finally:
                    self._launching = None
                self.progress_at = time.monotonic()
            self._engines[engine] = frozenset()

    async def leave(self, engine: HostedEngine) -> None:
        """Remove a stopped engine; removing the last one frees the model. Repeatable."""
        self._engines.pop(engine, None)
        self._users.discard(engine)
        if not self._engines and self._launching in (None, engine):
            await self._release({"weights"})
            self._devices.release(self.host_id)

    async def release(self, engine: HostedEngine, tags: frozenset[Memory]) -> None:
        """Mark memory as released by this engine, and free what all engines have released."""
        async with self._changing:
            self._engines[engine] |= tags
            self._users.discard(engine)
            if all(self._engines.values()):
                await self._release(frozenset.intersection(*self._engines.values()))

    async def _release(self, tags: Collection[Memory]) -> None:
        batcher, self.batcher = self.batcher, None
        if "weights" in tags:
            self.model = self.base = None
        if batcher is not None:
            await asyncio.to_thread(batcher.stop, _STOP_SECONDS)
            del batcher
            _give_back_memory()

    def die(self, reason: str) -> None:
        """Have all engines die, and drop the batcher. Repeatable."""
        self._drop_batcher()
        engines, self._engines = self._engines, {}
        for engine in engines:
            engine.died(reason)

    def _drop_batcher(self) -> None:
        """End the batcher, whose thread may hang, without waiting for it."""
        self._users.clear()
        batcher, self.batcher = self.batcher, None
        self.model = self.base = None
        if batcher is not None:
            batcher.stop(0.0)

    def required(self, engine: HostedEngine) -> tuple[SlotBatcher, PreTrainedModel]:
        """The batcher and its model. Raises `EngineDied`."""
        if self.batcher is None or self.model is None or not self.batcher.alive:
            self.die("its thread ended")
            raise EngineDied(engine.engine_id, engine.message)
        return self.batcher, self.model

    def holds(self, checksum: str) -> bool:
        """Whether the model's own weights have that checksum."""
        return self.base is not None and self.base.ref.checksum == checksum

    async def arranged(self, base: BaseWeights, engine: HostedEngine) -> Tensors | None:
        """The tensors of `base` by the model's names; None if they are loaded already. Raises
        `WeightsRefused`, also where engines of other policies serve other weights."""
        if self.holds(base.ref.checksum):
            self._users.add(engine)
            return None
        await self._require_alone(engine, base)
        _, model = self.required(engine)
        await asyncio.to_thread(verify, base.tensors, model, base.ref)
        return await asyncio.to_thread(arranged, base.tensors, model, base.ref)

    async def load(
        self,
        base: BaseWeights,
        tensors: Tensors,
        engine: HostedEngine,
        loaded: Callable[[], None],
    ) -> float:
        """Load the model's own weights, `base` as `arranged`, and call `loaded` before the next
        pass; returns the seconds that serving stood still. Raises `EngineDied`, and
        `WeightsRefused` as `arranged`."""
        async with self._changing:
            if self.holds(base.ref.checksum):  # another engine has loaded them meanwhile
                self._users.add(engine)
                loaded()
                return 0.0
            await self._require_alone(engine, base)
            batcher, model = self.required(engine)
            swap = partial(_swap, batcher, model, tensors, base.ref, loaded)
            self.base = None  # unknown, if it fails
            seconds = await self.between_passes(engine, swap)
            self.base = base
            self._users.add(engine)
            return seconds

    async def _require_alone(self, engine: HostedEngine, base: BaseWeights) -> None:
        """Raise `WeightsRefused` where other engines serve other weights than `base`."""
        others = [other.policy for other in self._users if other is not engine]
        if others and self.base is not None:
            names = ", ".join(sorted(others))
            raise await asyncio.to_thread(other_base, self.base, base, engine.policy, names)

    async def between_passes(self, engine: HostedEngine, call: Callable[[], float]) -> float:
        """Run a call of the batcher that pauses passes. Raises `EngineDied`."""
        try:
            async with asyncio.timeout(STALL_SECONDS):
                return await asyncio.to_thread(call)
        except TimeoutError as error:
            self.die(f"no step boundary within {STALL_SECONDS:g} s")
            raise EngineDied(engine.engine_id, engine.message) from error
        except RuntimeError as error:  # the batcher ended meanwhile
            self.die(str(error))
            raise EngineDied(engine.engine_id, engine.message) from error

    async def _launch(self, engine: HostedEngine) -> None:
        """Build and start a batcher; it is stopped again when the start is cancelled."""
        device = torch_device(self._where)
        if device.type == "cuda":
            device = torch.device("cuda", self._devices.share(self.host_id))
        loop = asyncio.get_running_loop()
        batcher, model = await asyncio.to_thread(self._build, loop, device)
        engine.require_wanted()
        # Set before the start, which may take minutes, so that `leave` ends it meanwhile. No turn
        # is submitted yet: the engine does not serve.
        self.batcher, self.model = batcher, model
        try:
            await asyncio.to_thread(batcher.start)
            engine.require_wanted()
        except BaseException:  # the start's thread goes on when this task is cancelled
            self.batcher = self.model = None
            await asyncio.shield(asyncio.to_thread(batcher.stop, 0.0))
            raise

    def _build(
        self, loop: asyncio.AbstractEventLoop, device: torch.device
    ) -> tuple[SlotBatcher, PreTrainedModel]:
        """A batcher that has not started, and its model. Blocking."""
        torch.set_num_threads(self._threads)
        spec = self._spec
        config = load_config(spec.language_model, self._policy)
        source = spec.language_model.resolved(config)
        text = config.get_text_config()
        model = skeleton(config, source.weight_dtype, self._policy)
        model.to(device)
        check_attention(model, self._policy, deterministic=self._deterministic)
        running = spec.engine.running_limit
        self.max_context = context_of(
            spec.engine.max_context, positions_of(text), default_room(model, running)
        )
        self.vocabulary = text.vocab_size
        self.eos_ids = end_ids(config, source.path, source.revision)

        def exited(reason: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(self._exited, batcher, reason)

        routers = Routers.of(model) if self._routed_experts else None
        if self._routed_experts and routers is None and is_mixture(config):
            raise EngineStartFailed(
                "the embedded engine cannot say which experts its tokens were sent to: its routers "
                "do not select by top-k",
                field="algorithm.router_replay",
                value=True,
                remedy="Turn it off, or serve this model with `kind: sglang`.",
            )
        try:
            batcher = SlotBatcher(
                model,
                max_running=running,
                max_context=self.max_context,
                exited=exited,
                routers=routers,
                keep_cache=spec.engine.cache == "keep",
                deterministic=self._deterministic,
            )
        except (OSError, torch.OutOfMemoryError) as error:
            raise EngineStartFailed(
                f"no memory for keys and values of {running} turns: {error}",
                field=f"policies.{self._policy}.engine.max_context",
                value=self.max_context,
                remedy="Lower it, or `max_running`.",
            ) from error
        for own in self.specs.values():
            if own.lora is not None:
                batcher.adapt(linear_layers(model, own.lora.target_modules)[0])
        return batcher, model

    def _exited(self, batcher: SlotBatcher, reason: str) -> None:
        if batcher is self.batcher:
            log.error("the model of %s died: %s", ", ".join(self.specs), reason)
            self.die(reason)


def torch_device(setting: str) -> torch.device:
    """The kind of device of this process's engines; "auto": a GPU if it sees one."""
    there = torch.cuda.is_available() if setting in ("auto", "cuda") else False
    if setting == "cuda" and not there:
        raise EngineStartFailed(
            "this process sees no GPU that its torch can use",
            field="TROUPE_ROLLOUT_DEVICE",
            value=setting,
            remedy="Set it to auto or cpu, or install a CUDA build of torch where there is a GPU.",
        )
    return torch.device("cuda", 0) if there else torch.device("cpu")


def _swap(
    batcher: SlotBatcher,
    model: torch.nn.Module,
    tensors: Tensors,
    ref: common_pb.WeightsRef,
    loaded: Callable[[], None],
) -> float:
    """Compute with `tensors` from the next pass on; see `SlotBatcher.swap`. Blocking."""
    former: list[torch.Tensor] = []

    def change() -> None:
        former.extend(adopt(tensors, model, ref))
        loaded()

    # The former tensors are unmapped on return, when passes are computed again.
    return batcher.swap(change)


def _give_back_memory() -> None:
    """Return to the driver what torch's allocator keeps, for others on the same GPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
