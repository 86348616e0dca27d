"""`SubprocessBatcher`: a `SlotBatcher` in a child process, seen from the rollout process.

Event loop, tokenizers and messages of a rollout worker share one interpreter lock with every engine
in it: each operator of a model waits for it. A child process has its own. Weights are in shared
memory, loaded by the parent while the child stands still; tokens come back pass by pass, so that a
turn that loses its engine continues from those it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Literal, TypeVar

import torch
from transformers import PreTrainedModel

from services.rollout.engines.errors import EngineStartFailed
from services.rollout.engines.paged_batcher import PASS_SECONDS, Ended
from services.rollout.engines.slot_batcher import notify_ended
from services.rollout.engines.turns import EngineTurn
from troupe.job import LoraSpec, ModelSpec

log = logging.getLogger(__name__)
T = TypeVar("T")

# The name of a message, then its arguments.
Message = list[Any]

_KILLED_SECONDS: Final = 5.0
# Bytes; kernels load whole vectors.
_ALIGNMENT: Final = 64


@dataclass
class _PausedPasses:
    """A pause of the child's passes that was requested."""

    number: int
    stage: Literal["requested", "paused", "ended"] = "requested"
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _WaitingTurn:
    """A turn that the child computes."""

    turn: EngineTurn
    loop: asyncio.AbstractEventLoop
    ended: Ended


class SubprocessBatcher:
    """Serves one model in a child process; its methods are called from the same threads as those of
    `SlotBatcher`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        source: ModelSpec,
        lora: LoraSpec | None,
        policy: str,
        max_running: int,
        max_context: int,
        keep_cache: bool,
        threads: int,
        start_seconds: float,
        drew: Callable[[int], None],
        exited: Callable[[str], None],
    ) -> None:
        """`model`: of `source`, without weights; `start` moves them to shared memory."""
        self._settings = {
            "model": source.model_dump(mode="json"),
            "lora": lora.model_dump(mode="json") if lora is not None else None,
            "policy": policy,
            "max_running": max_running,
            "max_context": max_context,
            "keep_cache": keep_cache,
            "threads": threads,
        }
        self._policy, self._start_seconds = policy, start_seconds
        self._model = model
        self._version = -1
        self._drew, self._exited = drew, exited
        self._numbers = itertools.count()
        # Messages of this iteration of the event loop.
        self._unsent: list[Message] = []
        # Held by the one caller that has passes paused.
        self._pausing = threading.Lock()
        self._state = threading.Condition()
        # Guarded by `_state`.
        self._waiting: dict[int, _WaitingTurn] = {}
        self._by_turn: dict[int, int] = {}
        self._pause: _PausedPasses | None = None
        self._ready = self._gone = self._stopping = False
        self._reason = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and wait until it serves. Raises `EngineStartFailed`, also when it is
        stopped meanwhile; the process has ended then."""
        ours, theirs = socket.socketpair()
        weights = allocate_weights(self._model)
        try:
            map_weights(self._model, weights)
            passed = (theirs.fileno(), weights)
            process = subprocess.Popen(
                [sys.executable, "-m", __package__, *map(str, passed)],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
            )
        finally:
            theirs.close()
            os.close(weights)  # the mapping stays
        self._connection = Connection(ours.detach())
        self._outbox = Outbox(self._connection, self._lost)
        self._outbox.put(self._settings)
        threading.Thread(target=self._read, daemon=True, name="engine-reader").start()
        with self._state:
            # From here on `stop` ends it; an earlier `stop` is noticed here.
            self._process = process
            self._state.wait_for(
                lambda: self._ready or self._gone or self._stopping, self._start_seconds
            )
            serves = self._ready and not self._stopping
        if not serves:
            self.stop(0.0)
            raise EngineStartFailed(
                f"its process was not ready: {self._reason or 'it did not answer'}",
                field=f"policies.{self._policy}.engine.own_process",
                value=True,
                remedy="Look into the rollout worker's log, or leave the engine in its process.",
            )

    @property
    def alive(self) -> bool:
        """Whether the process runs and takes turns."""
        return (
            self._process is not None
            and self._process.poll() is None
            and self._ready
            and not self._gone
            and not self._stopping
        )

    def submit(self, turn: EngineTurn, ended: Ended) -> None:
        """Serve `turn`; `ended(turn, error)` is called in this event loop when it has ended."""
        number = next(self._numbers)
        with self._state:
            self._waiting[number] = _WaitingTurn(turn, asyncio.get_running_loop(), ended)
            self._by_turn[id(turn)] = number
        s = turn.sampling
        how = [s.temperature, s.top_p, s.top_k, s.drawn]
        stops = sorted(turn.stop_ids)
        self._post(
            "turn", number, list(turn.prompt_ids), how, turn.max_new_tokens, stops, turn.seed
        )

    def cancel(self, turn: EngineTurn) -> None:
        """Stop computing `turn`; its `ended` is not called."""
        turn.closed = True
        with self._state:
            number = self._by_turn.pop(id(turn), None)
            if number is None:
                return
            del self._waiting[number]
        self._post("cancel", number)

    def swap(self, change: Callable[[], None], version: int) -> float:
        """Run `change`, which loads weights, between two passes; see `SlotBatcher.swap`."""
        with self._paused(version):
            began = time.monotonic()
            change()
            self._version = version
        return time.monotonic() - began

    def run_between_passes(self, call: Callable[[], T]) -> tuple[T, int]:
        """Run `call`, which only reads the model, between two passes; its result and the version.

        Raises as `swap`.
        """
        with self._paused(None):
            return call(), self._version

    def stop(self, timeout: float) -> None:
        """End the process. Turns in flight are dropped."""
        with self._state:
            self._stopping = True
            self._state.notify_all()
        process = self._process
        if process is None:
            return
        if timeout > 0 and self._ready:  # otherwise it is killed at once
            self._outbox.put("stop")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
        process.kill()
        try:
            process.wait(_KILLED_SECONDS)
        except subprocess.TimeoutExpired:
            log.error("process %d of an engine does not end, even when killed", process.pid)
        self._outbox.close(_KILLED_SECONDS)

    @contextlib.contextmanager
    def _paused(self, version: int | None) -> Iterator[None]:
        """Pause the child's passes; then it serves `version`, if one was loaded. Raises
        RuntimeError when the process has ended or hangs."""
        if not self._pausing.acquire(timeout=PASS_SECONDS):
            raise RuntimeError("the serving process hangs")
        succeeded = False
        try:
            pause = self._pause = _PausedPasses(next(self._numbers))
            self._outbox.put("pause", pause.number, version)
            try:
                self._wait_for(pause, "paused")
                yield
                succeeded = True
            finally:
                self._outbox.put("resume", pause.number, succeeded)
            self._wait_for(pause, "ended")
            if pause.problem:
                raise RuntimeError(pause.problem)
        finally:
            self._pause = None
            self._pausing.release()

    def _wait_for(self, pause: _PausedPasses, stage: str) -> None:
        def reached() -> bool:
            return pause.stage in (stage, "ended") or self._gone or self._stopping

        with self._state:
            in_time = self._state.wait_for(reached, PASS_SECONDS)
        if not in_time or pause.stage == "requested" or not self.alive:
            raise RuntimeError(f"the serving process has ended or hangs {self._reason}".rstrip())
        if pause.stage != stage:
            raise RuntimeError(pause.problem or "the serving process went on too early")

    def _post(self, *message: Any) -> None:
        """Send a message together with all others of this iteration of the event loop: turns that
        arrive together are read in one pass, not the first few in one of their own."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_posted)
        self._unsent.append(list(message))

    def _send_posted(self) -> None:
        unsent, self._unsent = self._unsent, []
        self._outbox.put_all(unsent)

    def _read(self) -> None:
        try:
            while True:
                for what, *rest in receive(self._connection):
                    self._handle(what, rest)
        except (EOFError, OSError):
            self._lost()

    def _handle(self, what: str, rest: Message) -> None:
        if what == "drew":
            self._drawn(*rest)
            return
        with self._state:
            pause = self._pause
            if what == "ready":
                self._ready = True
            elif what == "ended":
                self._reason = rest[0]
            elif pause is not None and pause.number == rest[0]:
                pause.stage = "paused" if what == "paused" else "ended"
                pause.problem = rest[1] if what == "resumed" else ""
            self._state.notify_all()

    def _drawn(
        self,
        version: int,
        tokens: list[tuple[int, int, float]],
        began: list[tuple[int, int, float]],
        ended: list[int],
    ) -> None:
        """Record the tokens of a pass: [turn, token, log-prob]; of turns that began in it, [turn,
        prompt tokens read, start]; and the numbers of turns that ended."""
        notices: dict[asyncio.AbstractEventLoop, list[tuple[Ended, EngineTurn]]] = {}
        with self._state:
            # Cancelled turns are not in `_waiting` any more.
            for number, read, at in began:
                if (waiting := self._waiting.get(number)) is not None:
                    waiting.turn.read_tokens, waiting.turn.started_at = read, at
            for number, token, logprob in tokens:
                if (waiting := self._waiting.get(number)) is not None:
                    waiting.turn.append(token, logprob, version)
            for number in ended:
                if (waiting := self._waiting.pop(number, None)) is not None:
                    del self._by_turn[id(waiting.turn)]
                    notices.setdefault(waiting.loop, []).append((waiting.ended, waiting.turn))
        self._drew(len(tokens))
        for loop, some in notices.items():
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(notify_ended, some)

    def _lost(self) -> None:
        """Handle a lost connection: the process is gone."""
        with self._state:
            first, self._gone = not self._gone, True
            stopping, ready = self._stopping, self._ready
            self._state.notify_all()
        if first and ready and not stopping:
            self._exited(self._reason or "its process ended")


def send(connection: Connection, messages: list[Message]) -> None:
    """Send messages as one JSON text. Blocking. Raises OSError when the other process is gone."""
    connection.send_bytes(json.dumps(messages, separators=(",", ":")).encode())


def receive(connection: Connection) -> list[Message]:
    """The next messages. Blocking. Raises EOFError or OSError when the other process is gone."""
    messages: list[Message] = json.loads(connection.recv_bytes())
    return messages


class Outbox:
    """Sends messages from a thread, so that callers never block; those put while it sends are sent
    together."""

    def __init__(self, connection: Connection, lost: Callable[[], None]) -> None:
        """`lost` is called when the other process is gone."""
        self._connection = connection
        self._lost = lost
        self._queue: queue.SimpleQueue[list[Message] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine-outbox")
        self._thread.start()

    def put(self, *message: Any) -> None:
        """Send one message, after those put before."""
        self._queue.put([list(message)])

    def put_all(self, messages: list[Message]) -> None:
        """Send messages together, after those put before."""
        self._queue.put(messages)

    def close(self, seconds: float) -> None:
        """Send the messages put so far, then end the thread."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            found = [self._queue.get()]
            while not self._queue.empty():
                found.append(self._queue.get())
            messages = [message for some in found if some is not None for message in some]
            try:
                if messages:
                    send(self._connection, messages)
            except OSError:
                self._lost()
                return
            if None in found:
                return


def allocate_weights(model: torch.nn.Module) -> int:
    """A descriptor of anonymous shared memory for all weights of `model`."""
    size = max((end for _, _, end in _layout(model)), default=0)
    descriptor = os.memfd_create("troupe-weights")
    os.ftruncate(descriptor, max(size, mmap.PAGESIZE))
    return descriptor


def map_weights(model: torch.nn.Module, descriptor: int) -> None:
    """Have the weights of `model` in that memory. Their values are those in it: of another process
    that mapped a model of the same configuration."""
    pages = mmap.mmap(descriptor, 0)
    for slot, start, _ in _layout(model):
        if slot.numel():
            flat = torch.frombuffer(pages, dtype=slot.dtype, count=slot.numel(), offset=start)
            slot.data = flat.view(slot.shape)


def _layout(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Every weight tensor once, with its first byte and the byte after its last."""
    seen: set[int] = set()
    at = 0
    for slot in model.state_dict(keep_vars=True).values():
        if id(slot) in seen:  # tied to one before it
            continue
        seen.add(id(slot))
        end = at + slot.numel() * slot.dtype.itemsize
        yield slot, at, end
        at = math.ceil(end / _ALIGNMENT) * _ALIGNMENT
