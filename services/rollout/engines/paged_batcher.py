"""transformers' continuous batching over a paged cache, with our sampling, abort and weight swap.

Serves models whose turns do not all fit into memory at full length, and those with other than plain
causal attention. The library's manager runs the model in a thread of its own. This module submits
turns, samples their tokens (by each turn's parameters and seed, with log-prob and version), and
changes weights between two of its steps. The manager's undocumented parts
(`batch_processor.scheduler`, `cache`, `output_router`) are used here only; transformers is pinned
to the version that this was written for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from transformers import (
    AttentionInterface,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.logits_process import LogitsProcessorList

from services.rollout.engines.sampling import draw
from services.rollout.engines.slot_cache import cache_bytes
from services.rollout.engines.turns import EngineTurn, PromptGate

log = logging.getLogger(__name__)

# Called in the event loop when a turn has ended, with the error if it failed.
Ended = Callable[[EngineTurn, str | None], None]
T = TypeVar("T")

NAME: Final = "troupe_packed"
# Requests with query lengths in the same interval are padded to each other: decoding turns (1),
# the rest of a prompt whose prefix was cached, whole prompts.
_BUCKETS: Final = (1, 16)
_FULL: Final = "full_attention"
# Added to masked scores. Finite: a padding row sees nothing at all, and must not become NaN.
_MASKED: Final = -1e30
# Tokens per forward pass. Larger passes read long prompts sooner, but on a CPU their matrices
# leave the cache: measured best between 256 and 512 for models of 0.1 to 1.5 M parameters.
STEP_TOKENS: Final = 512
# The same with transformers' stock attention, whose work grows with the square.
STOCK_STEP_TOKENS: Final = 128
# Tokens per cache page: prefixes are shared in whole pages. Smaller ones share more of short
# prompts and cost more bookkeeping.
PAGE_TOKENS: Final = 8
# Memory of keys and values, of running turns and cached prefixes together.
CACHE_BYTES: Final = 256 << 20
_WATCH_SECONDS: Final = 0.1
# A pass takes milliseconds. One that takes this long hangs.
PASS_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class PaddedBucket:
    """Requests that are padded to each other, right-aligned: b of them, Q queries, K keys.

    `gather` [b*Q]: packed positions of the queries; `source`, `target`: which of the b*Q outputs
    are real and where they go; `keys` slices the padded keys; `mask` [b, 1, repeat*Q, K].
    """

    b: int
    q: int
    k: int
    gather: torch.Tensor
    source: torch.Tensor | None
    target: torch.Tensor
    keys: slice
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """How one packed batch is cut into buckets; the same for all layers."""

    buckets: list[PaddedBucket]
    key_index: torch.Tensor
    """[sum b*K] into the packed keys."""
    read_index: torch.Tensor | None
    """The same, composed with the cache's read index; None when nothing is read from it."""


def moved(plan: BucketPlan, device: torch.device) -> BucketPlan:
    """`plan` with its tensors on `device`."""
    if device.type == "cpu":
        return plan

    def there(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else tensor.to(device)

    buckets = [
        replace(
            one,
            gather=there(one.gather),
            source=there(one.source),
            target=there(one.target),
            mask=there(one.mask),
        )
        for one in plan.buckets
    ]
    return BucketPlan(buckets, there(plan.key_index), there(plan.read_index))


def supports(config: Any) -> bool:
    """Whether a model with this configuration computes plain causal attention in every layer.

    Models that transformers does not run on `sdpa` have extras (caps, sinks) that our attention
    functions lack too.
    """
    if config._attn_implementation != "sdpa":
        return False
    kinds = getattr(config.get_text_config(), "layer_types", None)
    if kinds:
        return set(kinds) == {_FULL}
    return not getattr(config.get_text_config(), "sliding_window", None)


def make_plan(
    cu_q: torch.Tensor, cu_k: torch.Tensor, read_index: torch.Tensor, repeat: int
) -> BucketPlan:
    """The plan for packed requests whose queries and keys end at `cu_q[1:]` and `cu_k[1:]`. All
    are on the CPU, which needs their numbers."""
    q_end, k_end = cu_q[1:].long(), cu_k[1:].long()
    q_len, k_len = q_end - cu_q[:-1].long(), k_end - cu_k[:-1].long()
    bucket_of = torch.bucketize(q_len, torch.tensor(_BUCKETS))
    buckets: list[PaddedBucket] = []
    key_parts: list[torch.Tensor] = []
    start = 0
    for number in range(len(_BUCKETS) + 1):
        rows = (bucket_of == number).nonzero().squeeze(-1)
        b = rows.numel()
        if not b:
            continue
        q, k = int(q_len[rows].max()), int(k_len[rows].max())
        # Distance of each column from the request's last token: padding is on the left.
        q_back, k_back = torch.arange(q - 1, -1, -1), torch.arange(k - 1, -1, -1)
        gather = (q_end[rows] - 1).unsqueeze(1) - q_back
        key_parts.append(((k_end[rows] - 1).unsqueeze(1) - k_back).clamp_(min=0).view(-1))
        seen = (k_back < k_len[rows].unsqueeze(1)).unsqueeze(1)
        source, target = None, gather.view(-1)
        if q > 1:
            seen = seen & (k_back >= q_back.unsqueeze(1))
            source = (q_back < q_len[rows].unsqueeze(1)).view(-1).nonzero().squeeze(-1)
            target = target[source]
        mask = torch.zeros(seen.shape, dtype=torch.float32).masked_fill_(~seen, _MASKED)
        if q > 1:
            mask = mask.unsqueeze(1).expand(b, repeat, q, k).reshape(b, repeat * q, k)
        keys = slice(start, start + b * k)
        start = keys.stop
        gather = gather.clamp(min=0).view(-1)
        buckets.append(PaddedBucket(b, q, k, gather, source, target, keys, mask.unsqueeze(1)))
    key_index = torch.cat(key_parts)
    return BucketPlan(buckets, key_index, read_index[key_index] if read_index.numel() else None)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of `query` [1, heads, T, dim] over each request's cached and new keys.

    Called by the model in place of its stock attention, only within continuous batching (it
    needs the paged `cache` and the sequence lengths in `kwargs`). Returns [1, T, heads, dim].
    """
    if cache is None:
        raise ValueError(f"'{NAME}' attention serves continuous batching only")
    heads, kv_heads = query.shape[1], key.shape[1]
    repeat = heads // kv_heads
    # The lengths are the same tensors for all layers of a step: the plan lives beside them.
    lengths = kwargs["cu_seq_lens_k"]
    plan = lengths.get(NAME)
    if plan is None:
        cu_q, read = kwargs["cu_seq_lens_q"].cpu(), kwargs["read_index"][0].cpu()
        plan = moved(make_plan(cu_q, lengths[_FULL].cpu(), read, repeat), query.device)
        lengths[NAME] = plan
    if plan.read_index is not None:
        kwargs["read_index"] = [plan.read_index]
    keys, values = cache.update(key, value, layer_idx=module.layer_idx, kwargs=kwargs)
    keys, values = keys[0].transpose(0, 1), values[0].transpose(0, 1)
    if plan.read_index is None:
        keys, values = (x.index_select(0, plan.key_index) for x in (keys, values))
    tokens, dim = query.shape[2], query.shape[3]
    packed = query[0].transpose(0, 1).reshape(tokens, heads * dim)
    out = torch.empty_like(packed)
    for bucket in plan.buckets:
        b, q, k = bucket.b, bucket.q, bucket.k
        # Heads that share keys become further queries: [b, kv_heads, repeat * q, dim].
        rows = packed.index_select(0, bucket.gather).view(b, q, kv_heads, repeat, dim)
        rows = rows.permute(0, 2, 3, 1, 4).reshape(b, kv_heads, repeat * q, dim)
        result = F.scaled_dot_product_attention(
            rows,
            keys[bucket.keys].view(b, k, kv_heads, dim).transpose(1, 2),
            values[bucket.keys].view(b, k, kv_heads, dim).transpose(1, 2),
            attn_mask=bucket.mask.to(query.dtype),
            scale=scaling,
        )
        result = result.view(b, kv_heads, repeat, q, dim).permute(0, 3, 1, 2, 4)
        result = result.reshape(b * q, heads * dim)
        if bucket.source is not None:
            result = result.index_select(0, bucket.source)
        out.index_copy_(0, bucket.target, result)
    return out.view(1, tokens, heads, dim), None


AttentionInterface.register(NAME, packed_attention)


class TurnSampler(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]
    """Samples the tokens of a step in the place of the library's logits processors.

    It returns scores whose argmax is the sampled token; the library, set to greedy, takes it.
    """

    def __init__(
        self, drew: Callable[[int], None], first_token: Callable[[EngineTurn], None]
    ) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self.turns: dict[str, EngineTurn] = {}
        self.version = -1
        self._drew = drew
        self._first_token = first_token
        self._rows: list[EngineTurn | None] = []

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: torch.Tensor) -> Any:
        """Remember which turns the rows of the coming step belong to."""
        self._rows = []
        now = time.monotonic()
        for request in requests_in_batch:
            turn = self.turns.get(request.state.request_id)
            if turn is not None and not turn.versions:
                turn.read_tokens += request.query_length
                turn.started_at = turn.started_at or now
            if request.has_new_token:
                self._rows.append(turn)
        return arg_storage

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, arguments: torch.Tensor
    ) -> Any:
        """Sample for the first rows of `scores` [rows, vocabulary]; the rest is padding."""
        open_rows = [(i, t) for i, t in enumerate(self._rows) if t is not None and not t.closed]
        if not open_rows:
            return scores
        index = [i for i, _ in open_rows]
        tokens, logprobs = draw(scores[index], [turn.next_draw() for _, turn in open_rows])
        scores[index] = 0.0
        scores[index, tokens] = 1.0
        for (_, turn), token, logprob in zip(open_rows, tokens, logprobs, strict=True):
            turn.append(token, logprob, self.version)
            if len(turn.versions) == 1:
                self._first_token(turn)
        self._drew(len(open_rows))
        return scores


class ContinuousBatcher:
    """Serves one model in one thread, through transformers' manager.

    `submit` and `cancel` are called in the event loop's thread; `swap`, `run_between_passes` and
    `stop` block and are called in worker threads. `drew` is called with the number of tokens of
    each pass; `exited`, in some thread, when the serving thread ends without `stop`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_running: int,
        max_context: int,
        drew: Callable[[int], None],
        exited: Callable[[str], None],
    ) -> None:
        self._gate = PromptGate()
        self._sampler = TurnSampler(drew, self._open_gate)
        self._exited = exited
        self._stopping = False
        # The callback and event loop of each turn, by its key.
        self._ended: dict[str, tuple[Ended, asyncio.AbstractEventLoop]] = {}
        # Held while the manager is paused.
        self._pausing = threading.Lock()
        # Orders the manager's start and `stop`.
        self._starting = threading.Lock()
        self._started = threading.Event()
        packed = supports(model.config)
        self._manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=cache_pages(model, max_running, max_context),
                max_batch_tokens=max(STEP_TOKENS if packed else STOCK_STEP_TOKENS, max_running),
                max_requests_per_batch=max_running,
                use_async_batching=False,
                use_cuda_graph=False,
                auto_switch_to_flash=False,
            ),
        )
        self._manager.logit_processor = self._sampler
        if packed:
            # Only now: the manager's constructor knows the stock implementations alone.
            model.set_attn_implementation(NAME)

    def start(self) -> None:
        """Start serving. Returns at once."""
        # The manager's thread inherits being a daemon from the thread that starts it; a service
        # that ends without `stop` must not hang on it.
        threading.Thread(target=self._supervise, daemon=True, name="engine-watch").start()
        self._started.wait()

    @property
    def alive(self) -> bool:
        """Whether the serving thread runs and takes turns."""
        manager = self._manager
        denied = manager.background_thread_status.can_accept_new_requests()
        return bool(manager.is_running()) and denied is None

    def submit(self, turn: EngineTurn, ended: Ended) -> None:
        """Serve `turn`; `ended(turn, error)` is called in this event loop when it has ended."""
        self._register(turn, ended)
        if self._gate.enter(turn):
            self._add(turn)

    def cancel(self, turn: EngineTurn) -> None:
        """Stop computing `turn`; its `ended` is not called."""
        turn.closed = True
        self._forget(turn.key)
        self._manager.cancel_request(turn.key)
        self._open_gate(turn)

    def swap(self, change: Callable[[], None], version: int) -> float:
        """Run `change`, which loads weights, between two passes; later tokens carry `version`.

        Keys and values of the old weights are discarded; turns that had some are submitted again
        and their tokens so far recomputed. Returns the seconds that serving stood still. Raises
        RuntimeError when the thread has ended or hangs.
        """
        with self._paused():
            began = time.monotonic()
            change()
            self._sampler.version = version
            retracted = self._discard_cache()
            seconds = time.monotonic() - began
        for turn, (ended, loop) in retracted:
            loop.call_soon_threadsafe(self._resubmit, turn, ended)
        return seconds

    def run_between_passes(self, call: Callable[[], T]) -> tuple[T, int]:
        """Run `call`, which only reads the model, between two passes; its result and the version.

        Raises as `swap`.
        """
        with self._paused():
            return call(), self._sampler.version

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Pause the manager for one caller at a time: its own `pause` admits several."""
        if not self._pausing.acquire(timeout=PASS_SECONDS):
            raise RuntimeError("another call holds the model, and hangs")
        try:
            with self._manager.pause():
                yield
        finally:
            self._pausing.release()

    def stop(self, timeout: float) -> None:
        """End the serving thread. Turns in flight are dropped."""
        with self._starting:
            self._stopping = True
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=timeout, hard_stop=True)

    def _supervise(self) -> None:
        with self._starting:
            # The manager forgets a stop that came before its start.
            if not self._stopping:
                self._manager.start()
        self._started.set()
        while self._manager.is_running():
            time.sleep(_WATCH_SECONDS)
        if not self._stopping:
            self._exited(repr(self._manager.background_thread_status.fatal_error))

    def _resubmit(self, turn: EngineTurn, ended: Ended) -> None:
        """Continue a turn whose keys and values were discarded."""
        if turn.closed:
            return
        turn.incarnation += 1
        if not turn.versions:
            turn.read_tokens = 0
        self._register(turn, ended)
        self._add(turn)

    def _register(self, turn: EngineTurn, ended: Ended) -> None:
        key = turn.key
        self._sampler.turns[key] = turn
        self._ended[key] = ended, asyncio.get_running_loop()

        def done(output: Any) -> None:
            self._forget(key)
            self._open_gate(turn)
            ended(turn, output.error)

        self._manager.register_result_handler(key, done)

    def _add(self, turn: EngineTurn) -> None:
        # A refusal means that the thread is ending: `exited` fails all of its turns.
        self._manager.add_request(
            [*turn.prompt_ids, *turn.token_ids],
            request_id=turn.key,
            max_new_tokens=turn.remaining,
            eos_token_id=list(turn.stop_ids),
        )

    def _open_gate(self, turn: EngineTurn) -> None:
        for follower in self._gate.opened(turn):
            if not follower.closed:
                self._add(follower)

    def _forget(self, key: str) -> tuple[Ended, asyncio.AbstractEventLoop] | None:
        self._sampler.turns.pop(key, None)
        self._manager.output_router.result_handlers.pop(key, None)
        return self._ended.pop(key, None)

    def _discard_cache(self) -> list[tuple[EngineTurn, tuple[Ended, asyncio.AbstractEventLoop]]]:
        """Drop all keys and values, while paused; the turns that had some, in their order."""
        processor = self._manager.batch_processor
        active = list(processor.scheduler.active_requests)
        for key in active:
            processor.scheduler.set_request_cancellation(key)
        processor.scheduler.clear_cancelled_requests()
        processor.cache.reset()
        found = []
        for key in active:
            turn, waiting = self._sampler.turns.get(key), self._forget(key)
            if turn is not None and waiting is not None:
                found.append((turn, waiting))
        return found


def cache_pages(model: PreTrainedModel, max_running: int, max_context: int) -> int:
    """Pages of the cache: `max_running` turns at full length if `cache_bytes` allow, never fewer
    than four such turns.

    When pages run out the library preempts turns and recomputes them later.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * heads * dim * model.dtype.itemsize
    tokens = min(max_running * max_context, cache_bytes(model.device, CACHE_BYTES) // token_bytes)
    return int(-(-max(tokens, 4 * max_context) // PAGE_TOKENS))
