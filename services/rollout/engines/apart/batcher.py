"""`SlotBatcher` in a process of its own, seen from the process that has the engine.

Event loop, tokenizers and messages of a rollout worker share one interpreter lock with every
engine in it: each operator of a model waits for it in turn. A process of its own has its own lock.
Weights are in memory that both see, and loaded by this side while the other stands still; tokens
come back pass by pass, so that a turn that loses its engine goes on from those that it has.
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

from services.rollout.engines.base import EngineStartFailed
from services.rollout.engines.continuous import PASS_SECONDS, Ended
from services.rollout.engines.front import EngineTurn
from services.rollout.engines.slotted import tell
from troupe.job import LoraSpec, ModelSpec

Message = list[Any]


def send(connection: Connection, messages: list[Message]) -> None:
    """Blocking. Raises OSError when the other side is gone."""
    connection.send_bytes(json.dumps(messages, separators=(",", ":")).encode())


def receive(connection: Connection) -> list[Message]:
    """Blocking. Raises EOFError or OSError when the other side is gone."""
    messages: list[Message] = json.loads(connection.recv_bytes())
    return messages


class Outbox:
    """Sends from a thread of its own, so that nobody waits for the other side; what was put while
    it sent goes together."""

    def __init__(self, connection: Connection, lost: Callable[[], None]) -> None:
        """`lost` is called when the other side is gone."""
        self._connection = connection
        self._lost = lost
        self._queue: queue.SimpleQueue[list[Message] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine-outbox")
        self._thread.start()

    def put(self, *message: Any) -> None:
        """Send it, after what was put before."""
        self._queue.put([list(message)])

    def put_all(self, messages: list[Message]) -> None:
        """Send them together, after what was put before."""
        self._queue.put(messages)

    def close(self, seconds: float) -> None:
        """Send what was put, then end."""
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


# Kernels load whole vectors.
_ALIGNMENT = 64


def reserve(model: torch.nn.Module) -> int:
    """A file descriptor of memory for all weights of `model`; it has no name, so nothing stays."""
    size = max((end for _, _, end in _places(model)), default=0)
    descriptor = os.memfd_create("troupe-weights")
    os.ftruncate(descriptor, max(size, mmap.PAGESIZE))
    return descriptor


def settle(model: torch.nn.Module, descriptor: int) -> None:
    """Move the weights of `model` into that memory. What they held is not kept: where another
    process has settled a model of the same configuration they are that one's."""
    pages = mmap.mmap(descriptor, 0)
    for slot, start, _ in _places(model):
        if slot.numel():
            flat = torch.frombuffer(pages, dtype=slot.dtype, count=slot.numel(), offset=start)
            slot.data = flat.view(slot.shape)


def _places(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Every tensor that weights are loaded into, once, with its first byte and the one after."""
    seen: set[int] = set()
    at = 0
    for slot in model.state_dict(keep_vars=True).values():
        if id(slot) in seen:  # tied to one before it
            continue
        seen.add(id(slot))
        end = at + slot.numel() * slot.dtype.itemsize
        yield slot, at, end
        at = math.ceil(end / _ALIGNMENT) * _ALIGNMENT


log = logging.getLogger(__name__)
T = TypeVar("T")

_KILLED_SECONDS: Final = 5.0


@dataclass
class _Standstill:
    """A standstill that was asked for."""

    number: int
    stage: Literal["asked", "held", "over"] = "asked"
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _WaitingRequest:
    turn: EngineTurn
    loop: asyncio.AbstractEventLoop
    ended: Ended


class ApartBatcher:
    """One model being served by one process; threads may call as of `SlotBatcher`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        source: ModelSpec,
        lora: LoraSpec | None,
        policy: str,
        max_running: int,
        max_context: int,
        threads: int,
        start_seconds: float,
        drew: Callable[[int], None],
        exited: Callable[[str], None],
    ) -> None:
        """`model`: of `source`, without weights; they will be in shared memory."""
        self._about = {
            "model": source.model_dump(mode="json"),
            "lora": lora.model_dump(mode="json") if lora is not None else None,
            "policy": policy,
            "max_running": max_running,
            "max_context": max_context,
            "threads": threads,
        }
        self._policy, self._start_seconds = policy, start_seconds
        self._model = model
        self._version = -1
        self._drew, self._exited = drew, exited
        self._numbers = itertools.count()
        # Of the event loop.
        self._posts: list[Message] = []
        self._standing = threading.Lock()
        self._state = threading.Condition()
        # Guarded by `_state`.
        self._waiting: dict[int, _WaitingRequest] = {}
        self._by_turn: dict[int, int] = {}
        self._hold: _Standstill | None = None
        self._ready = self._gone = self._stopping = False
        self._reason = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, and wait until it serves. Raises `EngineStartFailed`, also when it is
        stopped before; the process has ended then."""
        ours, theirs = socket.socketpair()
        weights = reserve(self._model)
        try:
            settle(self._model, weights)
            passed = (theirs.fileno(), weights)
            process = subprocess.Popen(
                [sys.executable, "-m", __package__, *map(str, passed)],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
            )
        finally:
            theirs.close()
            os.close(weights)  # what is mapped stays
        self._connection = Connection(ours.detach())
        self._outbox = Outbox(self._connection, self._lost)
        self._outbox.put(self._about)
        threading.Thread(target=self._read, daemon=True, name="engine-reader").start()
        with self._state:
            # From here on `stop` ends it; an earlier one is seen here.
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
        """Whether the process runs and takes requests."""
        return (
            self._process is not None
            and self._process.poll() is None
            and self._ready
            and not self._gone
            and not self._stopping
        )

    def submit(self, turn: EngineTurn, ended: Ended) -> None:
        """Serve `turn`; `ended(turn, error)` is called in this event loop when it is over."""
        number = next(self._numbers)
        with self._state:
            self._waiting[number] = _WaitingRequest(turn, asyncio.get_running_loop(), ended)
            self._by_turn[id(turn)] = number
        s = turn.sampling
        how = [s.temperature, s.top_p, s.top_k, s.drawn]
        stops = sorted(turn.stop_ids)
        self._post("turn", number, turn.prompt_ids, how, turn.max_new_tokens, stops, turn.seed)

    def resubmit(self, turn: EngineTurn, ended: Ended) -> None:
        """As `submit`; nothing calls it, since `swap` keeps its turns."""
        self.submit(turn, ended)

    def cancel(self, turn: EngineTurn) -> None:
        """Stop working on `turn`; its `ended` is not called."""
        turn.closed = True
        with self._state:
            number = self._by_turn.pop(id(turn), None)
            if number is None:
                return
            del self._waiting[number]
        self._post("cancel", number)

    def swap(self, change: Callable[[], None], version: int) -> tuple[float, list[EngineTurn]]:
        """Run `change`, which loads weights, between two passes; see `SlotBatcher.swap`."""
        with self._standstill(version):
            began = time.monotonic()
            change()
            self._version = version
        return time.monotonic() - began, []

    def between(self, call: Callable[[], T]) -> tuple[T, int]:
        """Run `call`, which only reads the model, between two passes; its result and the version.

        Raises as `swap`.
        """
        with self._standstill(None):
            return call(), self._version

    def stop(self, timeout: float) -> None:
        """End the process. Turns in hand are dropped."""
        with self._state:
            self._stopping = True
            self._state.notify_all()
        process = self._process
        if process is None:
            return
        if timeout > 0 and self._ready:  # else it has nothing to end
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
    def _standstill(self, version: int | None) -> Iterator[None]:
        """No pass is computed. Raises RuntimeError when the process has ended or hangs."""
        if not self._standing.acquire(timeout=PASS_SECONDS):
            raise RuntimeError("the serving process hangs")
        fine = False
        try:
            hold = self._hold = _Standstill(next(self._numbers))
            self._outbox.put("hold", hold.number, version)
            try:
                self._until(hold, "held")
                yield
                fine = True
            finally:
                self._outbox.put("go", hold.number, fine)
            self._until(hold, "over")
            if hold.problem:
                raise RuntimeError(hold.problem)
        finally:
            self._hold = None
            self._standing.release()

    def _until(self, hold: _Standstill, stage: str) -> None:
        def come() -> bool:
            return hold.stage in (stage, "over") or self._gone or self._stopping

        with self._state:
            come_in_time = self._state.wait_for(come, PASS_SECONDS)
        if not come_in_time or hold.stage == "asked" or not self.alive:
            raise RuntimeError(f"the serving process has ended or hangs {self._reason}".rstrip())
        if hold.stage != stage:
            raise RuntimeError(hold.problem or "the serving process went on too early")

    def _post(self, *message: Any) -> None:
        """Have it sent with all else that this turn of the event loop has to say: turns that come
        together are read in one pass, not the first few of them in one of their own."""
        if not self._posts:
            asyncio.get_running_loop().call_soon(self._send_posts)
        self._posts.append(list(message))

    def _send_posts(self) -> None:
        posts, self._posts = self._posts, []
        self._outbox.put_all(posts)

    def _read(self) -> None:
        try:
            while True:
                for what, *rest in receive(self._connection):
                    self._hear(what, rest)
        except (EOFError, OSError):
            self._lost()

    def _hear(self, what: str, rest: Message) -> None:
        if what == "drew":
            self._drawn(*rest)
            return
        with self._state:
            hold = self._hold
            if what == "ready":
                self._ready = True
            elif what == "ended":
                self._reason = rest[0]
            elif hold is not None and hold.number == rest[0]:
                hold.stage = "held" if what == "held" else "over"
                hold.problem = rest[1] if what == "over" else ""
            self._state.notify_all()

    def _drawn(
        self,
        version: int,
        tokens: list[tuple[int, int, float]],
        began: list[tuple[int, int, float]],
        over: list[int],
    ) -> None:
        told: dict[asyncio.AbstractEventLoop, list[tuple[Ended, EngineTurn]]] = {}
        with self._state:
            # Cancelled ones are not there any more.
            for number, read, at in began:
                if (waiting := self._waiting.get(number)) is not None:
                    waiting.turn.read_tokens, waiting.turn.started_at = read, at
            for number, token, logprob in tokens:
                if (waiting := self._waiting.get(number)) is not None:
                    waiting.turn.append(token, logprob, version)
            for number in over:
                if (waiting := self._waiting.pop(number, None)) is not None:
                    del self._by_turn[id(waiting.turn)]
                    told.setdefault(waiting.loop, []).append((waiting.ended, waiting.turn))
        self._drew(len(tokens))
        for loop, some in told.items():
            with contextlib.suppress(RuntimeError):  # the loop has ended before us
                loop.call_soon_threadsafe(tell, some)

    def _lost(self) -> None:
        """The process is gone, or nobody can talk to it."""
        with self._state:
            first, self._gone = not self._gone, True
            stopping, ready = self._stopping, self._ready
            self._state.notify_all()
        if first and ready and not stopping:
            self._exited(self._reason or "its process ended")
