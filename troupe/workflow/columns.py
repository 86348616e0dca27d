"""User-defined columns of a turn's sample: named values that reach the trainer with it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any, Final

import numpy as np

from troupe.outcomes import JSON_BYTES, NotJsonError, json_text
from troupe.workflow.errors import WorkflowError, shown

# Names and dtypes that the experience store accepts.
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,63}")
_DTYPES: Final = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
# Columns that the trainer reads as one number per response token.
_PER_TOKEN: Final = frozenset({"reference_logprobs"})


class InvalidColumnError(WorkflowError, ValueError):
    """A column's name or value cannot be stored with a sample."""

    kind = "invalid_column"


class Columns(MutableMapping[str, Any]):
    """Columns of one reply by name. Arrays and tensors are copied when they are set."""

    __slots__ = ("_owner", "_tokens", "_values")

    def __init__(self, owner: str, tokens: int) -> None:
        """Create empty columns. `owner`: "agent[turn]", for error messages; `tokens`: length of the
        response."""
        self._owner = owner
        self._tokens = tokens
        self._values: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a numpy array, a torch tensor or a JSON value. Raises `InvalidColumnError`."""
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "reward":
            raise InvalidColumnError(
                f"{shown(name)} cannot name a column",
                field=f"{self._owner}.columns",
                value=name,
                remedy="Use up to 64 letters, digits, '.', '_' and '-', beginning with a letter or "
                "'_'; set a reward as `reply.reward`.",
            )
        field = f"{self._owner}.columns[{name!r}]"
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, np.ndarray) or _is_tensor(value):
            value = _copied(value, field)
        else:
            value = _checked_json(value, field)
        if name in _PER_TOKEN:
            value = self._per_token(value, field)
        self._values[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Columns({self._owner}: {', '.join(self._values)})"

    def _per_token(self, value: Any, field: str) -> Any:
        """Return the value as float32 [response]."""
        if _is_tensor(value):
            value = value.float().numpy()
        try:
            vector = np.array(value, np.float32)
        except (TypeError, ValueError, OverflowError):
            vector = np.empty(0, np.float32)
        if vector.shape != (self._tokens,) or not np.isfinite(vector).all():
            raise InvalidColumnError(
                f"needs one finite number for each of the {self._tokens} response tokens",
                field=field,
                value=value,
                remedy="Compute it for `reply.token_ids`.",
            )
        return vector


def _copied(value: Any, field: str) -> Any:
    name = str(value.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise InvalidColumnError(
            f"arrays of {name} cannot be stored",
            field=field,
            value=name,
            remedy=f"Convert it to one of {', '.join(_DTYPES)}.",
        )
    if isinstance(value, np.ndarray):
        return np.array(value, order="C")
    return value.detach().to("cpu", copy=True).contiguous()


def _checked_json(value: Any, field: str) -> Any:
    """Return a deep copy of a JSON value, which the workflow can no longer change."""
    try:
        text = json_text(value)
    except NotJsonError as error:
        raise InvalidColumnError(
            f"is neither an array nor JSON: {error}",
            field=field,
            value=value,
            remedy="Set a numpy array, a torch tensor, or JSON: strings, finite numbers, booleans, "
            "None, "
            "lists and dicts of them.",
        ) from error
    if len(text) > JSON_BYTES:
        raise InvalidColumnError(
            f"is {len(text):,} bytes of JSON; at most {JSON_BYTES:,} are stored",
            field=field,
            remedy="Set an array: large ones are stored by reference.",
        )
    return json.loads(text)


def _is_tensor(value: Any) -> bool:
    # torch may be missing; a caller with a tensor has imported it.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
