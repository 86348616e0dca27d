"""`python -m services.rollout.engines.apart SOCKET MEMORY`: an engine's model, served apart.

Both arguments are file descriptors that were inherited: the other side and the weights. Ends when
the other side ends, whatever it is computing.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn

import torch

from services.chassis.process import keep_freed_memory
from services.rollout.engines.apart import batcher
from services.rollout.engines.base import SamplingParams
from services.rollout.engines.continuous import PASS_SECONDS
from services.rollout.engines.front import EngineTurn
from services.rollout.engines.slotted import KVSlot, SlotBatcher
from services.rollout.engines.weights import add_adapter, load_config, skeleton
from troupe.job import LoraSpec, ModelSpec

# What is done at a standstill takes less; if not, the other side has given up long before.
_LONGEST_HOLD_SECONDS: Final = 10 * PASS_SECONDS


class _Reporting(SlotBatcher):
    """Tells of every pass; turns are named by their numbers."""

    def __init__(self, *args: Any, outbox: batcher.Outbox, **kwargs: Any) -> None:
        super().__init__(*args, drew=lambda count: None, **kwargs)
        self._outbox = outbox
        self._turns: dict[int, EngineTurn] = {}
        # Of the pass that is being recorded.
        self._over: list[EngineTurn] = []

    def take(self, number: int, turn: EngineTurn) -> None:
        """Serve `turn`, whose request id is the number."""
        self._turns[number] = turn
        if self._gate.enter(turn):
            self._add(turn)

    def give_up(self, number: int) -> None:
        """Stop working on a turn, unless it is over."""
        if (turn := self._turns.pop(number, None)) is not None:
            self.cancel(turn)

    def _record(self, slots: Sequence[KVSlot], logits: torch.Tensor) -> None:
        before = [(slot.turn, len(slot.turn.versions)) for slot in slots if slot.turn is not None]
        super()._record(slots, logits)
        over = [int(turn.request_id) for turn in self._over]
        for number in over:
            self._turns.pop(number, None)
        drew: list[tuple[int, int, float]] = []
        first: list[tuple[int, int, float | None]] = []
        for turn, count in before:
            if len(turn.versions) > count:
                number = int(turn.request_id)
                drew.append((number, turn.token_ids[-1], turn.logprobs[-1]))
                if not count:
                    first.append((number, turn.read_tokens, turn.started_at))
        self._outbox.put("drew", self._version, drew, first, over)

    def _report(self, turns: Sequence[EngineTurn]) -> None:
        super()._report(turns)
        self._over = list(turns)


class _Server:
    """Does what the other side says."""

    def __init__(self, connection: Connection, descriptor: int) -> None:
        self._connection = connection
        self._outbox = batcher.Outbox(connection, lambda: _exit(1))
        # Standstills that wait for `go`, and what it said.
        self._going: dict[int, tuple[threading.Event, list[bool]]] = {}
        ((about,),) = batcher.receive(connection)
        torch.set_num_threads(about["threads"])
        source = ModelSpec.model_validate(about["model"])
        model = skeleton(load_config(source, about["policy"]), source.dtype, about["policy"])
        lora = about["lora"]
        add_adapter(model, None if lora is None else LoraSpec.model_validate(lora))
        batcher.settle(model, descriptor)
        self._batcher = _Reporting(
            model,
            max_running=about["max_running"],
            max_context=about["max_context"],
            outbox=self._outbox,
            exited=self._ended,
        )

    def run(self) -> None:
        """Serve until told to stop, or until nobody tells anything any more."""
        self._batcher.start()
        self._outbox.put("ready")
        while True:
            for what, *rest in batcher.receive(self._connection):
                if what == "stop":
                    return
                getattr(self, f"_on_{what}")(*rest)

    def _on_turn(
        self,
        number: int,
        prompt: list[int],
        how: tuple[float, float, int, int],
        most: int,
        stops: list[int],
        seed: int,
    ) -> None:
        temperature, top_p, top_k, drawn = how
        sampling = SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=most, drawn=drawn
        )
        turn = EngineTurn(
            str(number), prompt, sampling, max_new_tokens=most, stop_ids=frozenset(stops), seed=seed
        )
        self._batcher.take(number, turn)

    def _on_cancel(self, number: int) -> None:
        self._batcher.give_up(number)

    def _on_hold(self, number: int, version: int | None) -> None:
        self._going[number] = threading.Event(), []
        # In a thread: the standstill begins when the pass has ended, and messages come meanwhile.
        threading.Thread(target=self._stand, args=(number, version), daemon=True).start()

    def _on_go(self, number: int, fine: bool) -> None:
        if (going := self._going.get(number)) is not None:
            event, said = going
            said.append(fine)
            event.set()

    def _stand(self, number: int, version: int | None) -> None:
        event, said = self._going[number]

        def wait() -> None:
            self._outbox.put("held", number)
            if not event.wait(_LONGEST_HOLD_SECONDS) or said != [True]:
                raise RuntimeError("what was to be done at a standstill failed")

        problem = ""
        try:
            if version is None:
                self._batcher.between(wait)
            else:
                self._batcher.swap(wait, version)
        except RuntimeError as error:
            problem = str(error)
        del self._going[number]
        self._outbox.put("over", number, problem)

    def _ended(self, reason: str) -> None:
        self._outbox.put("ended", reason)
        self._outbox.close(1.0)
        _exit(1)


def _exit(status: int) -> NoReturn:
    """Now: a thread may be in the middle of a pass, and nobody waits for it."""
    os._exit(status)


def main(arguments: Sequence[str]) -> None:
    """Serve."""
    # A terminal's Ctrl-C is for the worker, which stops us when it has drained.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    keep_freed_memory()
    connection, descriptor = Connection(int(arguments[0])), int(arguments[1])
    try:
        server = _Server(connection, descriptor)
        gc.collect()
        gc.freeze()
        server.run()
    except (EOFError, OSError):
        _exit(0)
    except Exception as error:
        batcher.send(connection, [["ended", repr(error)]])
        raise
    _exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
