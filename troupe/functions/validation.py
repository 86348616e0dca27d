"""The bounds of a function's declaration, checked by one validator for decorators, jobs and the
reward service.

This module imports only the standard library, since every sandbox imports it when it starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
ARGUMENT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
SANDBOXES: Final = ("process", "bubblewrap", "container")
if TYPE_CHECKING:
    SandboxName = str
else:
    SandboxName = Literal[SANDBOXES]
# An int32 on the wire.
MAX_COUNT: Final = 2**31 - 1
# A year: longer than any wait of a job or a call, and short enough for the arithmetic of every
# clock.
MAX_SECONDS: Final = 366 * 86_400
MAX_RETRIES: Final = 100
# More than any machine has; the scheduler tries each number of cores up to `max_cores`.
MAX_CORES: Final = 4096
# The number of process ids in Linux.
MAX_PROCESSES: Final = 1 << 22
MAX_ARGUMENTS: Final = 16
# Maximum number of files and folders that a function may see.
MAX_PATHS: Final = 1024

# Cost -> least value, largest value, and the remedy for a larger one.
_COUNTS: Final[Mapping[str, tuple[int, int, str]]] = {
    "memory_mib": (0, MAX_COUNT, "0 means no limit."),
    "max_concurrency": (0, MAX_COUNT, "0 means no limit."),
    "max_queued": (0, MAX_COUNT, "0 means no limit."),
    "min_workers": (0, MAX_COUNT, "Say how many workers to keep."),
    "retries": (0, MAX_RETRIES, "A call that fails so often will always fail."),
    "cores": (0, MAX_COUNT, "Say how many cores a call takes."),
    "max_cores": (0, MAX_CORES, "Say how many cores a call can use."),
    "gpus": (0, MAX_COUNT, "Say how many devices a call takes."),
    "quota_units": (1, MAX_COUNT, "Say how many units a call takes."),
    "processes": (
        1,
        MAX_PROCESSES,
        "Say how many simultaneous processes and threads a call needs.",
    ),
    "disk_mib": (1, MAX_COUNT, "Give the size of /tmp."),
}
_SECONDS: Final[Mapping[str, str]] = {
    "expected_seconds": "Say how long a call takes with the fewest cores; 0 if unknown.",
    "idle_seconds": "Say how many seconds.",
    "sandbox_idle_seconds": "Say how many seconds.",
}

Refuse = Callable[[str, object, str, str], None]


def check_costs(costs: Mapping[str, Any], refuse: Refuse) -> None:
    """Check the costs that `costs` names, by the names of a job's `rewards` and `tools`.

    For an invalid value, call `refuse(field, value, message, remedy)`, which raises.
    """
    for name, (least, most, remedy) in _COUNTS.items():
        if name not in costs:
            continue
        value = costs[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            refuse(
                name,
                value,
                f"is not a whole number of at least {least}",
                "Give one, or leave it out.",
            )
        if value > most:
            refuse(name, value, f"is more than {most:,}", remedy)
    most_cores, cores = costs.get("max_cores", 0), costs.get("cores", 1)
    if most_cores and most_cores < cores:
        refuse(
            "max_cores", most_cores, f"is less than `cores` ({cores})", "Leave it out, or raise it."
        )
    for name, remedy in _SECONDS.items():
        if not is_seconds(costs.get(name, 0.0)):
            refuse(name, costs[name], f"is not a number from 0 to {MAX_SECONDS:,}", remedy)
    timeout = costs.get("timeout_seconds", 1.0)
    if not is_seconds(timeout) or not timeout:
        message = f"is not a positive number of at most {MAX_SECONDS:,}"
        refuse("timeout_seconds", timeout, message, "Give every function a timeout.")
    fraction = costs.get("parallel_fraction", 0.5)
    if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        remedy = "It is the part of the time that more cores can shorten."
        refuse("parallel_fraction", fraction, "is not within 0 .. 1", remedy)
    _check_seconds_per(costs.get("seconds_per", {}), refuse)
    for name in ("reads", "writes"):
        if (paths := len(costs.get(name, ()))) > MAX_PATHS:
            refuse(name, paths, f"names more than {MAX_PATHS:,} paths", "Name folders.")
    sandbox = costs.get("sandbox", SANDBOXES[0])
    if sandbox not in SANDBOXES:
        refuse("sandbox", sandbox, "is not a sandbox", f"Known: {', '.join(SANDBOXES)}.")


def _check_seconds_per(seconds_per: object, refuse: Refuse) -> None:
    if not isinstance(seconds_per, Mapping):
        message = "is not a dict of seconds by argument"
        refuse("seconds_per", seconds_per, message, 'Write {"tests": 2.5}.')
        return
    if len(seconds_per) > MAX_ARGUMENTS:
        refuse(
            "seconds_per",
            sorted(seconds_per),
            f"names more than {MAX_ARGUMENTS} arguments",
            "Name the arguments that decide how long a call takes.",
        )
    for name, seconds in seconds_per.items():
        if not isinstance(name, str) or not ARGUMENT.fullmatch(name):
            refuse(
                "seconds_per", name, "is not an argument", 'Write "tests", or "query.data.tests".'
            )
        if not is_seconds(seconds):
            refuse(
                f"seconds_per.{name}",
                seconds,
                f"is not a number from 0 to {MAX_SECONDS:,}",
                "Say how many seconds each item adds.",
            )


def is_seconds(value: object) -> bool:
    """Return whether `value` is a number from 0 to `MAX_SECONDS`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= MAX_SECONDS  # type: ignore[operator]
