"""Ids that the caller of a mutating RPC makes, so that repeating the call has no second effect."""

from __future__ import annotations

import os
import random

# Of the operating system's randomness only the seed: asking it for every id is a system call, for
# which a thread lets go of the interpreter and then waits for it, thousands of times per step.
_numbers = random.Random(os.urandom(32))
os.register_at_fork(after_in_child=lambda: _numbers.seed(os.urandom(32)))


def new_id(prefix: str = "") -> str:
    """A fresh id, `{prefix}-{32 hex digits}`. Make it once per intention, not once per attempt."""
    fresh = f"{_numbers.getrandbits(128):032x}"
    return f"{prefix}-{fresh}" if prefix else fresh
