"""A failed write, also where a library in Rust says it in words."""

from __future__ import annotations

import errno
import os
import re
from typing import Final

# Of safetensors' errors and of tokenizers', which are plain exceptions.
_NUMBER: Final = re.compile(r"\(os error (\d+)\)|Os \{ code: (\d+)")
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def system_error(error: BaseException) -> OSError | None:
    """What the system said, if `error` is about that."""
    if isinstance(error, OSError):
        return error
    match = _NUMBER.search(str(error))
    if match is None:
        return None
    number = int(match[1] or match[2])
    return OSError(number, os.strerror(number))


def is_full(error: OSError) -> bool:
    """Whether there is no room, or none for whoever writes."""
    return error.errno in _FULL
