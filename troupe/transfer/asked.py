"""`Asked`: what a caller of `get` or `fetch` wants."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from troupe.transfer.arguments import check_checksum, check_key, deadline_in
from troupe.transfer.cast import cast_key, check_cast
from troupe.transfer.checksum import dtype_name
from troupe.transfer.places import Wanted


@dataclass(frozen=True)
class Asked:
    """The arguments, valid, and what follows from them. Raises InvalidArgument, InvalidKey."""

    key: str
    timeout: float
    expected: str | None = None
    base: str | None = None
    cast: torch.dtype | None = None
    # Of the monotonic clock; None for who does not wait.
    deadline: float | None = field(init=False)

    def __post_init__(self) -> None:
        check_key(self.key)
        check_checksum(self.expected)
        if self.base:
            check_key(self.base)
        if self.cast is not None:
            object.__setattr__(self, "cast", check_cast(self.cast))
        object.__setattr__(self, "deadline", deadline_in(self.timeout))

    @property
    def stored(self) -> str:
        """The key that it lies under."""
        return cast_key(self.key, self.cast)

    @property
    def wanted(self) -> Wanted:
        """Of a peer; a deadline of 0 is its own."""
        name = None if self.cast is None else dtype_name(self.cast)
        return Wanted(self.key, self.deadline or 0.0, self.expected, self.base, name)
