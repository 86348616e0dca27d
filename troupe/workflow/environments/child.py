"""The child process of a hosted environment, and its messages with the parent.

`python -m troupe.workflow.environments.child PARENT_PID` reads requests (`open`, `reset`, `step`)
from stdin and writes one answer per request to stdout; both are framed JSON objects.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, BinaryIO, Final

import numpy as np

from troupe.outcomes import NotJsonError, json_text
from troupe.processes.frames import frame, read_frame_from
from troupe.processes.tether import end_with_parent
from troupe.user_code import refuse_breakpoints
from troupe.workflow import errors
from troupe.workflow.environments.contract import is_reset, is_step
from troupe.workflow.environments.host import open_environment, raised_fault
from troupe.workflow.environments.interface import Environment, Observation, Properties, Reset, Step
from troupe.workflow.errors import EntrypointError, WorkflowError

MAX_FRAME_BYTES: Final = 16 * 2**20

# Errors whose class the parent restores; others become `EnvironmentFault`.
_TYPED: Final[dict[str, type[WorkflowError]]] = {
    cls.__name__: cls
    for cls in (
        EntrypointError,
        errors.EnvironmentContractError,
        errors.EpisodeOverError,
        errors.MissingLibraryError,
        errors.MoveError,
        errors.ObservationTooLargeError,
        errors.RewardNotFiniteError,
        errors.UnknownPlayerError,
    )
}


def pack(message: Mapping[str, Any]) -> bytes:
    """Encode the body of a frame. Raises `EnvironmentContractError` when it is too large or not
    JSON."""
    try:
        # The contract reports a NaN reward, with the seat's name.
        body = json_text(message, allow_nan=True).encode()
    except NotJsonError as error:
        raise errors.EnvironmentContractError(
            f"a message between a workflow and a hosted environment must be JSON: {error}",
            field="environment",
            value=message,
            remedy="Use strings, numbers, booleans, None, lists and dicts; arrays in `arrays`.",
        ) from error
    if len(body) > MAX_FRAME_BYTES:
        raise errors.ObservationTooLargeError(
            f"a message of an environment has {len(body):,} bytes; the limit is "
            f"{MAX_FRAME_BYTES:,}",
            field="environment",
            remedy="Observe less.",
        )
    return body


def unpack(body: bytes) -> dict[str, Any]:
    """Decode the body of a frame. Raises ValueError unless it is a JSON object."""
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError(f"a JSON object is needed, not {type(message).__name__}")
    return message


def to_properties(given: Mapping[str, Any]) -> Properties:
    """Return the inverse of `asdict`."""
    return Properties(**{**given, "seats": tuple(given["seats"])})


def from_reset(reset: Reset) -> dict[str, Any]:
    """Return a reset as JSON values; `infos` are converted by `pack`."""
    return {
        "agents": reset.agents,
        "current": reset.current,
        "obs": {seat: _from_observation(seen) for seat, seen in reset.obs.items()},
        "infos": reset.infos,
    }


def to_reset(given: Mapping[str, Any]) -> Reset:
    """Return the inverse of `from_reset`; tuples inside actions and infos have become lists."""
    return Reset(
        tuple(given["agents"]), tuple(given["current"]), _observations(given), given["infos"]
    )


def from_step(step: Step) -> dict[str, Any]:
    """Return a step as JSON values; `infos` are converted by `pack`."""
    return {
        "obs": {seat: _from_observation(seen) for seat, seen in step.obs.items()},
        "rewards": step.rewards,
        "terminations": step.terminations,
        "truncations": step.truncations,
        "current": step.current,
        "infos": step.infos,
    }


def to_step(given: Mapping[str, Any]) -> Step:
    """Return the inverse of `from_step`."""
    return Step(
        _observations(given),
        given["rewards"],
        given["terminations"],
        given["truncations"],
        tuple(given["current"]),
        given["infos"],
    )


def from_error(error: WorkflowError) -> dict[str, Any]:
    """Return an error as JSON values, for `to_error`."""
    return {
        "type": type(error).__name__,
        "message": error.message,
        "field": error.field,
        "value": error.value,
        "remedy": error.remedy,
        "seat": getattr(error, "seat", ""),
        "traceback": error.traceback,
    }


def to_error(given: Mapping[str, Any], environment: str) -> WorkflowError:
    """Restore the error that the child raised."""
    message, remedy, value = given["message"], given["remedy"], given["value"]
    if given["type"] == errors.IllegalMoveError.__name__:
        return errors.IllegalMoveError(message, seat=given["seat"], value=value, remedy=remedy)
    cls = _TYPED.get(given["type"])
    if cls is not None:
        return cls(message, field=given["field"], value=value, remedy=remedy)
    return errors.EnvironmentFault(
        message,
        reason="raised",
        environment=environment,
        remedy=remedy,
        traceback=given["traceback"],
    )


def _from_observation(seen: Observation) -> dict[str, Any]:
    return {
        "text": seen.text,
        "legal": seen.legal,
        "arrays": {name: _from_array(np.asarray(a)) for name, a in seen.arrays.items()},
    }


def _observations(given: Mapping[str, Any]) -> dict[str, Observation]:
    return {
        seat: Observation(
            seen["text"],
            seen["legal"],
            {
                name: np.frombuffer(
                    base64.b64decode(array["data"]), np.dtype(array["dtype"])
                ).reshape(array["shape"])
                for name, array in seen["arrays"].items()
            },
        )
        for seat, seen in given["obs"].items()
    }


def _from_array(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} has no bytes")
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": array.shape, "data": data}


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the request and answer pipes, and free stdin and stdout, which games may use.

    Processes that a game forks have neither: what they run must not answer for the game.
    """
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for pipe in (requests, answers):
        os.register_at_fork(after_in_child=pipe.raw.close)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


class EnvironmentChild:
    """The environment of this process, which carries out requests."""

    def __init__(self) -> None:
        self._environment: Environment | None = None
        self._name = ""

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one request; exceptions of the environment become `error`."""
        try:
            return {"ok": self._carry_out(request)}
        except WorkflowError as error:
            return {"error": from_error(error)}
        except BaseException as error:  # also SystemExit
            return {"error": from_error(raised_fault(self._name, error))}

    def _carry_out(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["op"] == "open":
            self._name = request["entrypoint"]
            self._environment = open_environment(self._name, request["args"])
            return asdict(self._environment.properties)
        assert self._environment is not None, "open comes first"
        if request["op"] == "reset":
            return from_reset(is_reset(self._environment.reset(request["seed"])))
        return from_step(is_step(self._environment.step(request["actions"])))

    def close(self) -> None:
        """Close the environment; errors are ignored."""
        if self._environment is not None:
            with contextlib.suppress(Exception):
                self._environment.close()


def main() -> None:
    """Serve requests until the pipe ends; `argv[1]` is the parent's process id."""
    # SIGKILL: native code of a game may never return to Python.
    end_with_parent(int(sys.argv[1]), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    refuse_breakpoints("Debug it with `troupe environment check`, where breakpoints work.")
    requests, answers = take_pipes()
    child, me = EnvironmentChild(), os.getpid()
    while (body := read_frame_from(requests)) is not None:
        answer = child.answer(unpack(body))
        if os.getpid() != me:  # forked by the game, and came back from its code
            os._exit(0)
        try:
            packed = pack(answer)
        except WorkflowError as error:
            packed = pack({"error": from_error(error)})
        answers.write(frame(packed))
        answers.flush()
    child.close()


if __name__ == "__main__":
    main()
