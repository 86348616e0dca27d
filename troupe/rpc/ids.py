"""Ids: those that the caller of a mutating RPC makes, so that repeating the call has no second
effect, and those of events in a job's log."""

from __future__ import annotations

import os
import random
import re
from typing import Final

from troupe.rpc.errors import InvalidArgument

# Of the operating system's randomness only the seed: asking it for every id is a system call, for
# which a thread lets go of the interpreter and then waits for it, thousands of times per step.
_numbers = random.Random(os.urandom(32))
os.register_at_fork(after_in_child=lambda: _numbers.seed(os.urandom(32)))


def new_id(prefix: str = "") -> str:
    """A fresh id, `{prefix}-{32 hex digits}`. Make it once per intention, not once per attempt."""
    fresh = f"{_numbers.getrandbits(128):032x}"
    return f"{prefix}-{fresh}" if prefix else fresh


# Of jobs and policies: also the name of a directory.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(field: str, value: str) -> str:
    """`value`, the id of a job or the name of a policy. Raises `InvalidArgument`."""
    if not _NAME.fullmatch(value):
        raise InvalidArgument(
            "must be 1 to 128 letters, digits, '.', '_' or '-', and begin with a letter or digit",
            field=field,
            value=value if value.isprintable() else ascii(value),
            remedy="Send it as the job's record and specification have it.",
        )
    return value


# As Redis makes them for the entries of a stream: milliseconds, and a number among those.
_EVENT_ID: Final = re.compile(r"[0-9]{1,19}(-[0-9]{1,19})?")


def check_event_id(after: str, field: str = "after") -> None:
    """Raise `InvalidArgument` unless `after` is empty or the id of an event in a job's log."""
    if after and not _EVENT_ID.fullmatch(after):
        raise InvalidArgument(
            "is not an event id",
            field=field,
            value=after,
            remedy="Pass the event_id of an event of this job, or nothing.",
        )
