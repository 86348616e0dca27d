"""What an engine's front and its process say to each other: lists of messages, as JSON.

A message is a list whose first element says what it is. To the process:

- `turn`, number, prompt ids, [temperature, top_p, top_k, drawn], most tokens, stop ids, seed
- `cancel`, number
- `hold`, number, version: compute nothing until `go`; version: of the weights that will be there
  then, None where they stay
- `go`, number, whether what was done meanwhile was done well
- `stop`

From it:

- `ready`
- `drew`, version, [[turn, token, log-prob], ...], [[turn, prompt tokens read, when it began], ...]
  of those whose first token it is, [turn, ...] of those that are over
- `held`, number; `over`, number, what went wrong or nothing
- `ended`, why
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

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
