"""The engine whose model is computed by the rollout process's own torch.

Small models on CPUs: one command and no installation. A batcher computes the passes in a thread of
its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar, Final

import torch
from transformers import PreTrainedModel

from services.rollout.engines.base import ServingEngine, Tensors
from services.rollout.engines.errors import EngineDied, EngineStartFailed
from services.rollout.engines.requests import EngineResponse, Memory, ScoreRequest
from services.rollout.engines.server_process import EngineDevices
from services.rollout.engines.slot_attention import check_attention
from services.rollout.engines.slot_batcher import SlotBatcher, default_room
from services.rollout.engines.turns import EngineTurn
from services.rollout.engines.weights import (
    Adapted,
    add_adapter,
    adopt,
    arranged,
    check_base,
    check_published,
    load_config,
    served_beside,
    skeleton,
    verify,
)
from troupe.job import PolicySpec
from troupe.mixtures import Routers, is_mixture
from troupe.rpc.errors import Internal, TroupeError
from troupe.scheduling.defaults import context_of
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling
from troupe.workflow.languages import end_ids, positions_of

log = logging.getLogger(__name__)

# A step takes milliseconds to seconds. One that takes this long is stuck.
STALL_SECONDS: Final = 60.0
# Missed probes after which a SUSPECT engine is declared dead.
MISSES_UNTIL_DEAD: Final = 3
# An engine that was idle this long is asked for a token: a thread that lives but never computes
# looks like an idle one.
PROBE_AFTER_SECONDS: Final = 15.0
PROBE_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 5.0
# Tokens of one scoring pass, during which no turn gets on.
PASS_TOKENS: Final = 4096
# Logits of one scoring pass, in numbers.
_PASS_LOGITS: Final = 1 << 25


class EmbeddedEngine(ServingEngine):
    """Serves a policy with the rollout process's own torch.

    Weights change between two passes of the model: keys and values of running turns are recomputed
    under the new weights, and the turns continue. A version is served from where it was published,
    in this host's shared memory: the engines of a policy share one copy. `threads`: torch threads
    of the process; more than one hurts on shared cores, where they spin.

    A LoRA adapter is merged into a copy of a float32 base, and computed beside a half-precision one
    (weights.py).

    `deterministic`: a turn with a seed is bitwise a function of (weights, prompt, seed), whatever
    else is batched with it and whatever is cached; slower (docs/guarantees.md).

    `routed_experts`: turns of a mixture of experts say which experts their tokens were sent to.

    `device`: "cpu", "cuda" or "auto"; on GPUs, one of `devices`, which engines take in turn. A GPU
    has a copy of the weights per engine.
    """

    kind: ClassVar[str] = "embedded"

    def __init__(
        self,
        engine_id: str,
        policy: str,
        spec: PolicySpec,
        *,
        threads: int = 1,
        deterministic: bool = False,
        device: str = "cpu",
        devices: EngineDevices | None = None,
        routed_experts: bool = False,
    ) -> None:
        super().__init__(engine_id, policy, in_flight=spec.engine.in_flight)
        self._spec = spec
        self._threads = threads
        self._deterministic = deterministic
        self._where = device
        self._routed_experts = routed_experts
        self._devices = devices or EngineDevices()
        self._model: torch.nn.Module | None = None
        self._batcher: SlotBatcher | None = None
        self._progress_at = time.monotonic()
        self._misses = 0

    @property
    def held_devices(self) -> frozenset[int]:
        """Indices of the worker's devices that the engine computes on."""
        return self._devices.held(self.engine_id)

    async def _begin(self) -> None:
        """Build the model without weights and start its batcher."""
        if self._batcher is not None:  # its thread may hang: do not wait for it
            await asyncio.to_thread(self._batcher.stop, 0.0)
        await self._bring_up()

    async def abort(self, request_id: str) -> None:
        """End a request early: its `generate` returns the tokens so far."""
        turn = self._turns.get(request_id)
        future = self._waiting.get(request_id)
        if turn is not None and future is not None and not future.done():
            self._drop(turn)
            future.set_result(turn.result(aborted=True))

    async def check(self) -> common_pb.EngineState.ValueType:
        """Probe the batcher: it must be alive and, with turns in flight, draw tokens."""
        if not self._life.alive or self._asleep:
            return self.state
        if self._batcher is None or not self._batcher.alive:
            self._die("its thread ended")
            return self.state
        stalled = time.monotonic() - self._progress_at
        idle = not len(self._turns)
        if idle and self._life.serves and stalled > PROBE_AFTER_SECONDS:
            missed = not await self._generates()
        else:
            missed = not idle and stalled > STALL_SECONDS
        if missed and self._life.serves:
            self._misses += 1
            reason = f"no token for {stalled:.0f} s"
            if self._misses >= MISSES_UNTIL_DEAD:
                self._die(reason)
            elif self.state == common_pb.ENGINE_STATE_HEALTHY:
                self._life.suspect(reason)
        elif not missed:
            self._misses = 0
            if self.state == common_pb.ENGINE_STATE_SUSPECT:
                self._life.recovered()
        return self.state

    async def _generates(self) -> bool:
        """Whether the model computes a token. The probe is not counted as load."""
        params = Sampling(max_new_tokens=1, seed=0)
        turn = self._new_turn(f"probe-{time.monotonic_ns()}", [0], params)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._serve(turn)
        except TimeoutError:
            self._drop(turn)
            return False
        except TroupeError as error:
            log.warning("engine %s: its probe failed: %s", self.engine_id, error)
            return False
        self._progress_at = time.monotonic()
        return True

    async def stop(self) -> None:
        """End turns as aborted, then the batcher, and release the model."""
        self._life.stopped()
        for turn in self._turns:
            await self.abort(turn.request_id)
        batcher, self._batcher, self._model = self._batcher, None, None
        if batcher is not None:
            await asyncio.to_thread(batcher.stop, _STOP_SECONDS)
            del batcher
            _give_back_memory()
        self._devices.release(self.engine_id)

    async def _serve(self, turn: EngineTurn) -> EngineResponse:
        batcher = self._require_batcher()
        future: asyncio.Future[EngineResponse] = asyncio.get_running_loop().create_future()
        self._waiting[turn.request_id] = future
        if len(self._turns) == 1:
            self._progress_at = time.monotonic()
        try:
            batcher.submit(turn, self._ended)
            return await future
        finally:
            del self._waiting[turn.request_id]

    async def _score(
        self, asked: Sequence[ScoreRequest], temperature: float
    ) -> tuple[list[list[float]], int] | None:
        found: dict[int, list[float]] = {}
        versions = set()
        for numbers in scoring_passes(asked, self.vocabulary):
            batcher, model = self._require_batcher(), self._model
            assert model is not None  # alive
            some = [asked[number] for number in numbers]
            call = partial(continuation_logprobs, model, some, temperature)
            try:
                rows, version = await asyncio.to_thread(batcher.run_between_passes, call)
            except (RuntimeError, TimeoutError) as error:
                raise EngineDied(self.engine_id, str(error)) from error
            versions.add(version)
            found |= zip(numbers, rows, strict=True)
        if len(versions) != 1:
            return None
        return [found[number] for number in range(len(asked))], versions.pop()

    def _drop(self, turn: EngineTurn) -> None:
        if self._batcher is not None:
            self._batcher.cancel(turn)

    def _fail_turns(self, error: Exception) -> None:
        for turn, future in self._unanswered():
            self._drop(turn)
            response = turn.result(aborted=True)
            if response.finish_reason == "abort":
                future.set_exception(error)
            else:  # it has its last token; the notification is on its way (`notify_ended`)
                future.set_result(response)

    async def _release(self, tags: frozenset[Memory]) -> None:
        batcher, self._batcher = self._batcher, None
        if "weights" in tags:
            self._model = None
        if batcher is not None:
            await asyncio.to_thread(batcher.stop, _STOP_SECONDS)
            del batcher
            _give_back_memory()

    async def _resume(self, tags: frozenset[Memory]) -> None:
        if tags == self._asleep:  # all that was released: cache and model are built together
            await self._bring_up()

    async def _fits(self, tensors: Tensors, ref: common_pb.WeightsRef) -> None:
        assert self._model is not None  # alive
        await asyncio.to_thread(check_published, tensors, self._model, self._spec.lora, ref.key)

    async def _fits_base(self, adapted: Adapted) -> None:
        assert self._model is not None  # alive
        await asyncio.to_thread(check_base, adapted, self._model)

    async def _prepared(
        self, tensors: Tensors, ref: common_pb.WeightsRef, adapted: Adapted | None
    ) -> tuple[Tensors, common_pb.WeightsRef]:
        assert self._model is not None  # alive
        if adapted is not None:
            adapted = await asyncio.to_thread(adapted.in_model, self._model, ref)
            place = adapted.beside if served_beside(self._model) else adapted.merged
            return await asyncio.to_thread(place, ref)
        await asyncio.to_thread(verify, tensors, self._model, ref)
        return await asyncio.to_thread(arranged, tensors, self._model, ref), ref

    async def _apply(self, tensors: Tensors, ref: common_pb.WeightsRef) -> float:
        batcher, model = self._require_batcher(), self._model
        assert model is not None  # alive
        self._return_turns(ref)
        on_host = next(model.parameters()).device.type == "cpu"
        self._way = "mapped" if on_host else "copied"
        try:
            async with asyncio.timeout(STALL_SECONDS):
                return await asyncio.to_thread(_swap, batcher, model, tensors, ref)
        except TimeoutError as error:
            self._die(f"no step boundary within {STALL_SECONDS:g} s")
            raise EngineDied(self.engine_id, self.message) from error
        except RuntimeError as error:  # the batcher ended meanwhile
            self._die(str(error))
            raise EngineDied(self.engine_id, self.message) from error

    async def _bring_up(self) -> None:
        """Build the model and start its batcher; on failure DEAD and `EngineStartFailed`."""
        seconds = self._spec.engine.start_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._launch()
        except TimeoutError as error:
            self._life.died(f"not ready within {seconds:g} s")
            raise EngineStartFailed(
                f"not ready within {seconds:g} s",
                field=f"policies.{self.policy}.engine.start_timeout_seconds",
                value=seconds,
                remedy="Allow more time, or look why the model's configuration loads slowly.",
            ) from error
        except EngineStartFailed as error:
            self._life.died(str(error))
            raise
        self._progress_at, self._misses = time.monotonic(), 0

    async def _launch(self) -> None:
        """Build and start a batcher; it is stopped again when the start is cancelled."""
        device = torch_device(self._where)
        if device.type == "cuda":
            device = torch.device("cuda", self._devices.share(self.engine_id))
        loop = asyncio.get_running_loop()
        batcher, model = await asyncio.to_thread(self._build, loop, device)
        self._require_wanted()
        # Set before the start, which may take minutes, so that `stop` ends it meanwhile. No turn
        # is submitted yet: the engine does not serve.
        self._batcher, self._model = batcher, model
        try:
            await asyncio.to_thread(batcher.start)
            self._require_wanted()
        except BaseException:  # the start's thread goes on when this task is cancelled
            self._batcher = self._model = None
            await asyncio.shield(asyncio.to_thread(batcher.stop, 0.0))
            raise

    def _require_wanted(self) -> None:
        if self.state == common_pb.ENGINE_STATE_STOPPED:
            raise EngineDied(self.engine_id, "it was stopped")

    def _build(
        self, loop: asyncio.AbstractEventLoop, device: torch.device
    ) -> tuple[SlotBatcher, torch.nn.Module]:
        """A batcher that has not started, and its model. Blocking."""
        torch.set_num_threads(self._threads)
        spec = self._spec
        config = load_config(spec.language_model, self.policy)
        source = spec.language_model.resolved(config)
        text = config.get_text_config()
        model = skeleton(config, source.weight_dtype, self.policy)
        model.to(device)
        add_adapter(model, spec.lora)
        check_attention(model, self.policy, deterministic=self._deterministic)
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
                drew=self._drew,
                exited=exited,
                routers=routers,
                keep_cache=spec.engine.cache == "keep",
                deterministic=self._deterministic,
            )
        except (OSError, torch.OutOfMemoryError) as error:
            raise EngineStartFailed(
                f"no memory for keys and values of {running} turns: {error}",
                field=f"policies.{self.policy}.engine.max_context",
                value=self.max_context,
                remedy="Lower it, or `max_running`.",
            ) from error
        return batcher, model

    def _require_batcher(self) -> SlotBatcher:
        if self._batcher is None or not self._batcher.alive:
            self._die("its thread ended")
            raise EngineDied(self.engine_id, self.message)
        return self._batcher

    def _drew(self, count: int) -> None:
        self._turns.drew(count)
        self._progress_at = time.monotonic()

    def _ended(self, turn: EngineTurn, error: str | None) -> None:
        """Called by the batcher in the event loop when it has finished `turn`."""
        if error is not None and (self._batcher is None or not self._batcher.alive):
            self._die(error)
            return
        future = self._waiting.get(turn.request_id)
        if future is None or future.done() or turn.closed:
            return
        turn.closed = True
        if error is None:
            future.set_result(turn.result())
        else:
            future.set_exception(
                Internal(
                    f"engine {self.engine_id} could not serve request {turn.request_id}: {error}",
                    kind="engine_request_failed",
                )
            )

    def _exited(self, batcher: SlotBatcher, reason: str) -> None:
        if batcher is self._batcher:
            log.error("engine %s of policy %s died: %s", self.engine_id, self.policy, reason)
            self._die(reason)


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


def _give_back_memory() -> None:
    """Return to the driver what torch's allocator keeps, for others on the same GPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _swap(
    batcher: SlotBatcher, model: torch.nn.Module, tensors: Tensors, ref: common_pb.WeightsRef
) -> float:
    """Serve `tensors` from the next pass on; see `SlotBatcher.swap`. Blocking."""
    former: list[torch.Tensor] = []

    def change() -> None:
        former.extend(adopt(tensors, model, ref))

    # The former tensors are unmapped on return, when passes are computed again.
    return batcher.swap(change, ref.version)


def scoring_passes(asked: Sequence[ScoreRequest], vocabulary: int) -> list[list[int]]:
    """Indices into `asked` by scoring pass. Rows of a pass have one length, so none needs
    padding."""
    by_row: dict[tuple[int, ...], list[int]] = {}
    for number, one in enumerate(asked):
        by_row.setdefault(_row(one), []).append(number)
    by_length: dict[int, list[list[int]]] = {}
    for row, numbers in by_row.items():
        by_length.setdefault(len(row), []).append(numbers)
    found: list[list[int]] = []
    for length, rows in by_length.items():
        tail = max(len(asked[n].ids) for numbers in rows for n in numbers)
        room = max(1, min(PASS_TOKENS // length, _PASS_LOGITS // (tail * vocabulary)))
        parts = (rows[at : at + room] for at in range(0, len(rows), room))
        found += [[n for numbers in part for n in numbers] for part in parts]
    return found


def continuation_logprobs(
    model: PreTrainedModel, asked: Sequence[ScoreRequest], temperature: float
) -> list[list[float]]:
    """Log-probs of continuations by one pass; their rows have one length."""
    rows = {row: at for at, row in enumerate(dict.fromkeys(map(_row, asked)))}
    tail = max(len(one.ids) for one in asked)
    with torch.inference_mode(), _stock_attention(model):
        ids = torch.tensor(list(rows), device=model.device)
        out = model(input_ids=ids, use_cache=False, logits_to_keep=tail)
        table = torch.log_softmax(out.logits.float() / temperature, dim=-1)
        found: list[list[float]] = []
        for one in asked:
            ours = table[rows[_row(one)], tail - len(one.ids) :]
            chosen = torch.tensor(one.ids, device=model.device).unsqueeze(1)
            found.append(ours.gather(1, chosen).squeeze(1).tolist())
    return found


def _row(one: ScoreRequest) -> tuple[int, ...]:
    """The input of a pass: the last token predicts nothing."""
    return one.prompt_ids + one.ids[:-1]


@contextlib.contextmanager
def _stock_attention(model: PreTrainedModel) -> Iterator[None]:
    """Have the model compute with transformers' attention: a batcher's needs a batcher's cache."""
    own = model.config._attn_implementation
    # As `weights.skeleton` chooses it.
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(own)
