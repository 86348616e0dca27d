"""What an owner says of a read whose bytes come another way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from troupe.rpc.errors import DeadlineExceeded, TroupeError, Unavailable


class StreamReader:
    """A stream that a thread reads, so that nobody waits for it but with a deadline.

    `first`: what it began with; None while there is nothing.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._ended = False
        self.first: Any = None
        self._begun = threading.Event()
        self._after: Callable[[bool], None] | None = None
        # Why there will be no bytes; None while there may be.
        self.failure: TroupeError | None = None
        threading.Thread(target=self._read, name="transfer-reader", daemon=True).start()

    def check(self) -> None:
        """Raises why there will be no bytes."""
        if self.failure is not None:
            raise self.failure

    def begins(self, timeout: float) -> Any:
        """Its first message. Raises why there is none, DeadlineExceeded after `timeout` seconds."""
        if not self._begun.wait(timeout):
            raise DeadlineExceeded(f"nothing was said within {timeout:g} s")
        if self.first is None:
            self.check()
            raise Unavailable("the owner ended early", kind="transfer_cut_short")
        return self.first

    def then(self, after: Callable[[bool], None]) -> None:
        """Call `after` once it has ended, with whether it ended well: at the latest at its
        deadline, in this thread or its own."""
        with self._lock:
            if not self._ended:
                self._after = after
                return
        after(self.failure is None)

    def cancel(self) -> None:
        """End it."""
        self._stream.cancel()

    def _read(self) -> None:
        try:
            for message in self._stream:
                self.first = self.first or message
                self._begun.set()
        except TroupeError as error:
            self.failure = error
        finally:
            with self._lock:
                self._ended, after = True, self._after
            self._begun.set()
            if after is not None:
                after(self.failure is None)
