"""The process around one hosted environment: answers requests on a pipe until that ends.

    python -m troupe.workflow.environments.child PARENT_PID

It leads a process group of its own, dies with its parent, and keeps the pipe to itself: what the
environment prints goes to stderr, and what it reads from stdin is empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

from troupe.workflow.environments import wire
from troupe.workflow.environments.contract import is_reset, is_step
from troupe.workflow.environments.interface import Environment
from troupe.workflow.environments.opening import open_environment, raised_fault
from troupe.workflow.errors import WorkflowError

_PR_SET_PDEATHSIG: Final = 1


def die_with(parent: int) -> None:
    """SIGKILL when the parent ends, by the kernel's hand: native code may never return to us."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The request and answer pipes, moved away from stdin and stdout."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


class Child:
    """Holds the environment and carries out requests."""

    def __init__(self) -> None:
        self._environment: Environment | None = None
        self._name = ""

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request, whatever the environment does."""
        try:
            return {"ok": self._carry_out(request)}
        except WorkflowError as error:
            return {"error": wire.from_error(error)}
        except BaseException as error:  # SystemExit is the environment's too
            return {"error": wire.from_error(raised_fault(self._name, error))}

    def _carry_out(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["op"] == "open":
            self._name = request["entrypoint"]
            self._environment = open_environment(self._name, request["args"])
            return wire.from_properties(self._environment.properties)
        assert self._environment is not None, "open comes first"
        if request["op"] == "reset":
            return wire.from_reset(is_reset(self._environment.reset(request["seed"])))
        return wire.from_step(is_step(self._environment.step(request["actions"])))

    def close(self) -> None:
        """Close the environment, if it can be."""
        if self._environment is not None:
            with contextlib.suppress(Exception):
                self._environment.close()


def main() -> None:
    """Serve until the pipe ends."""
    die_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    requests, answers = take_pipes()
    child = Child()
    while len(header := requests.read(wire.HEADER_BYTES)) == wire.HEADER_BYTES:
        body = requests.read(int.from_bytes(header, "big"))
        answer = child.answer(wire.unpack(body))
        try:
            frame = wire.pack(answer)
        except WorkflowError as error:
            frame = wire.pack({"error": wire.from_error(error)})
        answers.write(frame)
        answers.flush()
    child.close()


if __name__ == "__main__":
    main()
