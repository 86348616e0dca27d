"""Ids that the caller of a mutating RPC makes, so that repeating the call has no second effect."""

from __future__ import annotations

import uuid


def new_id(prefix: str = "") -> str:
    """A fresh id, `{prefix}-{32 hex digits}`. Make it once per intention, not once per attempt."""
    fresh = uuid.uuid4().hex
    return f"{prefix}-{fresh}" if prefix else fresh
