"""JSON of what authors' code returns: `json.dumps(..., default=plain)`."""

from __future__ import annotations

from typing import Any


def plain(value: Any) -> Any:
    """numpy and torch scalars and arrays as the numbers that they are.

    Raises TypeError for anything else that JSON does not know.
    """
    for name in ("tolist", "item"):
        method = getattr(value, name, None)
        if callable(method):
            return method()
    raise TypeError(f"{type(value).__name__} is not JSON")
