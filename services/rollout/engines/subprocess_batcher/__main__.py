"""`python -m services.rollout.engines.subprocess_batcher SOCKET MEMORY`: the child process.

It computes the passes of an engine's model. Both arguments are inherited file descriptors: the
parent's socket and the shared memory of the weights. It ends when the parent ends, whatever it is
computing.
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
from services.rollout.engines.paged_batcher import PASS_SECONDS
from services.rollout.engines.slot_batcher import SlotBatcher
from services.rollout.engines.slot_cache import KVSlot
from services.rollout.engines.subprocess_batcher import batcher
from services.rollout.engines.turns import EngineTurn
from services.rollout.engines.weights import add_adapter, load_config, skeleton
from troupe.job import LoraSpec, ModelSpec
from troupe.workflow.backend import Sampling
from troupe.workflow.token_ids import TokenIds

# Longer than any pause that the parent waits for.
_LONGEST_PAUSE_SECONDS: Final = 10 * PASS_SECONDS


class _ReportingBatcher(SlotBatcher):
    """Sends the tokens of every pass to the parent; turns have numbers."""

    def __init__(self, *args: Any, outbox: batcher.Outbox, **kwargs: Any) -> None:
        super().__init__(*args, drew=lambda count: None, **kwargs)
        self._outbox = outbox
        self._turns: dict[int, EngineTurn] = {}
        # Turns that ended in the pass that is being recorded.
        self._just_ended: list[EngineTurn] = []

    def submit_number(self, number: int, turn: EngineTurn) -> None:
        """Serve `turn`, whose request id is `number`."""
        self._turns[number] = turn
        if self._gate.enter(turn):
            self._add(turn)

    def cancel_number(self, number: int) -> None:
        """Stop computing a turn, unless it has ended."""
        if (turn := self._turns.pop(number, None)) is not None:
            self.cancel(turn)

    def _record(self, slots: Sequence[KVSlot], logits: torch.Tensor) -> None:
        before = [(slot.turn, len(slot.turn.versions)) for slot in slots if slot.turn is not None]
        super()._record(slots, logits)
        ended = [int(turn.request_id) for turn in self._just_ended]
        for number in ended:
            self._turns.pop(number, None)
        drew: list[tuple[int, int, float]] = []
        first: list[tuple[int, int, float | None]] = []
        for turn, count in before:
            if len(turn.versions) > count:
                number = int(turn.request_id)
                drew.append((number, turn.token_ids[-1], turn.logprobs[-1]))
                if not count:
                    first.append((number, turn.read_tokens, turn.started_at))
        self._outbox.put("drew", self._version, drew, first, ended)

    def _report(self, turns: Sequence[EngineTurn]) -> None:
        super()._report(turns)
        self._just_ended = list(turns)


class _Child:
    """Handles the parent's messages."""

    def __init__(self, connection: Connection, descriptor: int) -> None:
        self._connection = connection
        self._outbox = batcher.Outbox(connection, lambda: _exit(1))
        # Pauses that wait for `resume`, and whether it reported success.
        self._pauses: dict[int, tuple[threading.Event, list[bool]]] = {}
        ((settings,),) = batcher.receive(connection)
        torch.set_num_threads(settings["threads"])
        source = ModelSpec.model_validate(settings["model"])
        model = skeleton(
            load_config(source, settings["policy"]), source.weight_dtype, settings["policy"]
        )
        lora = settings["lora"]
        add_adapter(model, None if lora is None else LoraSpec.model_validate(lora))
        batcher.map_weights(model, descriptor)
        self._batcher = _ReportingBatcher(
            model,
            max_running=settings["max_running"],
            max_context=settings["max_context"],
            keep_cache=settings["keep_cache"],
            outbox=self._outbox,
            exited=self._ended,
        )

    def run(self) -> None:
        """Serve until the parent stops it or is gone."""
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
        sampling = Sampling(
            temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=most, drawn=drawn
        )
        turn = EngineTurn(
            str(number),
            TokenIds.of(prompt),
            sampling,
            max_new_tokens=most,
            stop_ids=frozenset(stops),
            seed=seed,
        )
        self._batcher.submit_number(number, turn)

    def _on_cancel(self, number: int) -> None:
        self._batcher.cancel_number(number)

    def _on_pause(self, number: int, version: int | None) -> None:
        self._pauses[number] = threading.Event(), []
        # In a thread: the pause begins when the pass has ended, and messages arrive meanwhile.
        threading.Thread(target=self._pause, args=(number, version), daemon=True).start()

    def _on_resume(self, number: int, succeeded: bool) -> None:
        if (waiting := self._pauses.get(number)) is not None:
            event, outcome = waiting
            outcome.append(succeeded)
            event.set()

    def _pause(self, number: int, version: int | None) -> None:
        event, outcome = self._pauses[number]

        def wait() -> None:
            self._outbox.put("paused", number)
            if not event.wait(_LONGEST_PAUSE_SECONDS) or outcome != [True]:
                raise RuntimeError("what was to be done at a standstill failed")

        problem = ""
        try:
            if version is None:
                self._batcher.run_between_passes(wait)
            else:
                self._batcher.swap(wait, version)
        except RuntimeError as error:
            problem = str(error)
        del self._pauses[number]
        self._outbox.put("resumed", number, problem)

    def _ended(self, reason: str) -> None:
        self._outbox.put("ended", reason)
        self._outbox.close(1.0)
        _exit(1)


def _exit(status: int) -> NoReturn:
    """Exit at once: a thread may be in the middle of a pass."""
    os._exit(status)


def main(arguments: Sequence[str]) -> None:
    """Serve until the parent ends."""
    # A terminal's Ctrl-C is for the worker, which stops this process when it has drained.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    keep_freed_memory()
    connection, descriptor = Connection(int(arguments[0])), int(arguments[1])
    try:
        child = _Child(connection, descriptor)
        gc.collect()
        gc.freeze()
        child.run()
    except (EOFError, OSError):
        _exit(0)
    except Exception as error:
        batcher.send(connection, [["ended", repr(error)]])
        raise
    _exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
