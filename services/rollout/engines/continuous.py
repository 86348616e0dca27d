"""transformers' continuous batching with our sampling: admission, abort, weight swap.

The library's manager runs the model in a thread of its own. This module gives it turns, draws
their tokens (by each turn's parameters and seed, noting log-prob and version), and changes
weights between two of its steps. What it touches beyond the manager's documented methods
(`batch_processor.scheduler`, `cache`, `output_router`) is touched here only; transformers is
pinned to the version that this was written for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.logits_process import LogitsProcessorList

from services.rollout.engines import attention
from services.rollout.engines.gate import PromptGate
from services.rollout.engines.sampling import draw
from services.rollout.engines.turns import Turn

log = logging.getLogger(__name__)

# Tokens per forward pass. Larger passes read long prompts sooner, but on a CPU their matrices
# leave the cache: measured best between 256 and 512 for models of 0.1 to 1.5 M parameters.
STEP_TOKENS = 512
# The same where the stock attention has to do: its work grows with the square.
STOCK_STEP_TOKENS = 128
# Tokens per cache page: prefixes are shared in whole pages. Smaller ones share more of short
# prompts and cost more bookkeeping.
PAGE_TOKENS = 8
# Keys and values kept, turns in hand and cached prefixes together.
CACHE_BYTES = 256 << 20
_WATCH_SECONDS = 0.1
# A pass takes milliseconds. One that takes this long hangs.
PASS_SECONDS = 60.0

Ended = Callable[[Turn, str | None], None]
T = TypeVar("T")


class TurnSampler(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]
    """Draws the tokens of a step where the library would warp logits.

    It returns scores whose argmax is the token drawn, so the library, set to greedy, goes on
    with that token.
    """

    def __init__(self, drew: Callable[[int], None], first_token: Callable[[Turn], None]) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self.turns: dict[str, Turn] = {}
        self.version = -1
        self._drew = drew
        self._first_token = first_token
        self._rows: list[Turn | None] = []

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: torch.Tensor) -> Any:
        """Note which turns the rows of the coming step belong to."""
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
        """Draw for the first rows of `scores` [rows, vocabulary]; the rest is padding."""
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
    """One model being served by one thread.

    `submit`, `resubmit` and `cancel` belong to the event loop's thread; `swap` and `stop` block
    and belong to worker threads. `exited` is called, in some thread, when the serving thread
    ends without `stop`.
    """

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
        self._standing = threading.Lock()
        # Who is first, the manager's start or `stop`?
        self._beginning = threading.Lock()
        self._started = threading.Event()
        packed = attention.supports(model.config)
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
            model.set_attn_implementation(attention.NAME)

    def start(self) -> None:
        """Start serving. Returns at once."""
        # The manager's thread inherits being a daemon from the thread that starts it; a service
        # that ends without `stop` must not hang on it.
        threading.Thread(target=self._supervise, daemon=True, name="engine-watch").start()
        self._started.wait()

    @property
    def alive(self) -> bool:
        """Whether the serving thread runs and takes requests."""
        manager = self._manager
        denied = manager.background_thread_status.can_accept_new_requests()
        return bool(manager.is_running()) and denied is None

    def submit(self, turn: Turn, ended: Ended) -> None:
        """Serve `turn`; `ended(turn, error)` is called in this event loop when it is over."""
        self._register(turn, ended)
        if self._gate.enter(turn):
            self._add(turn)

    def resubmit(self, turn: Turn, ended: Ended) -> None:
        """Go on with a turn that `swap` retracted: prompt and tokens so far are read again."""
        turn.incarnation += 1
        if not turn.versions:
            turn.read_tokens = 0
        self._register(turn, ended)
        self._add(turn)

    def cancel(self, turn: Turn) -> None:
        """Stop working on `turn`; its `ended` is not called."""
        turn.closed = True
        self._forget(turn.key)
        self._manager.cancel_request(turn.key)
        self._open_gate(turn)

    def swap(self, change: Callable[[], None], version: int) -> tuple[float, list[Turn]]:
        """Run `change` between two steps; later tokens carry `version`.

        Everything computed with the old weights is forgotten. Returns the seconds that serving
        stood still and the turns that have to be resubmitted, in their order. Raises RuntimeError
        when the thread has ended or hangs.
        """
        with self._standstill():
            began = time.monotonic()
            change()
            self._sampler.version = version
            retracted = self._forget_cache()
            return time.monotonic() - began, retracted

    def between(self, call: Callable[[], T]) -> tuple[T, int]:
        """Run `call`, which only reads the model, between two steps; its result and the version.

        Raises as `swap`.
        """
        with self._standstill():
            return call(), self._sampler.version

    @contextlib.contextmanager
    def _standstill(self) -> Iterator[None]:
        """The loop is paused, and nobody else has it paused: `pause` alone lets several in."""
        if not self._standing.acquire(timeout=PASS_SECONDS):
            raise RuntimeError("another call holds the model, and hangs")
        try:
            with self._manager.pause():
                yield
        finally:
            self._standing.release()

    def stop(self, timeout: float) -> None:
        """End the serving thread. Turns in hand are dropped."""
        with self._beginning:
            self._stopping = True
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=timeout, hard_stop=True)

    def _supervise(self) -> None:
        with self._beginning:
            # The manager forgets a stop that came before its start.
            if not self._stopping:
                self._manager.start()
        self._started.set()
        while self._manager.is_running():
            time.sleep(_WATCH_SECONDS)
        if not self._stopping:
            self._exited(repr(self._manager.background_thread_status.fatal_error))

    def _register(self, turn: Turn, ended: Ended) -> None:
        key = turn.key
        self._sampler.turns[key] = turn

        def done(output: Any) -> None:
            self._forget(key)
            self._open_gate(turn)
            ended(turn, output.error)

        self._manager.register_result_handler(key, done)

    def _add(self, turn: Turn) -> None:
        # A refusal means that the thread is dying: `exited` deals with all of its turns.
        self._manager.add_request(
            turn.prompt_ids + turn.token_ids,
            request_id=turn.key,
            max_new_tokens=turn.remaining,
            eos_token_id=list(turn.stop_ids),
        )

    def _open_gate(self, turn: Turn) -> None:
        for follower in self._gate.opened(turn):
            if not follower.closed:
                self._add(follower)

    def _forget(self, key: str) -> None:
        self._sampler.turns.pop(key, None)
        self._manager.output_router.result_handlers.pop(key, None)

    def _forget_cache(self) -> list[Turn]:
        """Within a pause: drop all keys and values; returns the turns that had some."""
        processor = self._manager.batch_processor
        active = list(processor.scheduler.active_requests)
        for key in active:
            processor.scheduler.set_request_cancellation(key)
        processor.scheduler.clear_cancelled_requests()
        processor.cache.reset()
        turns = [self._sampler.turns.get(key) for key in active]
        for key in active:
            self._forget(key)
        return [turn for turn in turns if turn is not None and not turn.closed]


def cache_pages(model: PreTrainedModel, max_running: int, max_context: int) -> int:
    """Pages of the cache: all turns at full length if `CACHE_BYTES` allow, never fewer than four.

    Fewer pages than turns could fill is no error: the library puts turns back and reads them
    again later.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * heads * dim * model.dtype.itemsize
    tokens = min(max_running * max_context, CACHE_BYTES // token_bytes)
    return int(-(-max(tokens, 4 * max_context) // PAGE_TOKENS))
