"""Ids of requests, which make mutating RPCs idempotent; checks of names and event ids."""

from __future__ import annotations

import os
import random
import re
from typing import Final

from troupe.rpc.errors import InvalidArgument

# Seeded by the operating system once: a system call per id would release the interpreter lock and
# wait for it again, thousands of times per step.
_numbers = random.Random(os.urandom(32))
os.register_at_fork(after_in_child=lambda: _numbers.seed(os.urandom(32)))


def new_id(prefix: str = "") -> str:
    """Return a new id, `{prefix}-{32 hex digits}`. Make one per operation, not one per attempt."""
    fresh = f"{_numbers.getrandbits(128):032x}"
    return f"{prefix}-{fresh}" if prefix else fresh


# Ids of jobs and names of policies, which are also names of directories.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(field: str, value: str) -> str:
    """Return `value` if it is a valid job id or policy name. Raises `InvalidArgument`."""
    if not _NAME.fullmatch(value):
        raise InvalidArgument(
            "must be 1 to 128 letters, digits, '.', '_' or '-', and begin with a letter or digit",
            field=field,
            value=value if value.isprintable() else ascii(value),
            remedy="Send it as written in the job's record or specification.",
        )
    return value


# Ids of Redis stream entries: milliseconds, and a sequence number.
_EVENT_ID: Final = re.compile(r"[0-9]{1,19}(-[0-9]{1,19})?")


def check_event_id(after: str, field: str = "after") -> None:
    """Raise `InvalidArgument` unless `after` is empty or the id of an event in a job's log."""
    if after and not _EVENT_ID.fullmatch(after):
        raise InvalidArgument(
            "is not an event id",
            field=field,
            value=after,
            remedy="Pass the event_id of one of this job's events, or omit it.",
        )
