"""Functions that end in every way a user's function can end."""

from __future__ import annotations

import asyncio
import os
import pdb
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

calls = 0


def score(answer: str, expected: str) -> float:
    return float(answer == expected)


async def score_later(answer: str, seconds: float = 0.01) -> dict[str, Any]:
    await asyncio.sleep(seconds)
    return {"solver": len(answer), "details": [1, None, "x"]}


def raises() -> float:
    raise ValueError("this answer cannot be scored")


def hangs() -> float:
    while True:
        pass


def sleeps(seconds: float, tag: str = "") -> str:
    time.sleep(seconds)
    return tag


def waits(path: str, tag: str = "") -> str:
    """Until there is a file at `path`."""
    while not Path(path).exists():
        time.sleep(0.01)
    return tag


def stamps(path: str, seconds: float = 0.0) -> float:
    """Leave a line in a file: proof that it ran."""
    with Path(path).open("a") as log:
        log.write("ran\n")
    time.sleep(seconds)
    return 1.0


def eats_memory(mib: int) -> int:
    return len(bytearray(mib * 2**20))


def nothing_finite() -> dict[str, float]:
    return {"solver": float("nan")}


def not_json() -> Any:
    return object()


def numpy_numbers() -> Any:
    return {"a": np.float32(0.5), "b": np.arange(3), "c": np.bool_(True)}


def numpy_nan() -> Any:
    return np.float64("nan")


def huge() -> str:
    return "x" * (17 * 2**20)


def exits() -> None:
    sys.exit(3)


def dies() -> None:
    os._exit(7)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def recurses() -> None:
    recurses()


def pid() -> int:
    return os.getpid()


def loaded_modules() -> list[str]:
    return sorted({name.partition(".")[0] for name in sys.modules})


not_a_function = 3


def its_cores() -> int:
    return len(os.sched_getaffinity(0))


def wide(size: int, i: int) -> Any:
    """Return a result of about this number of bytes."""
    return {"text": "x" * size, "i": i}


def mixed(i: int, end: str) -> Any:
    """End in the requested way."""
    if end == "raise":
        raise ValueError(i)
    if end == "nan":
        return float("nan")
    if end == "die":
        os._exit(7)
    if end == "memory":
        raise MemoryError
    return None if end == "none" else i


def prints() -> str:
    print("one")
    print("two\nthree", end="")
    return "done"


def stops(debugger: bool) -> float:
    if debugger:
        pdb.set_trace()
    else:
        breakpoint()
    return 1.0


def prints_and_waits(path: str) -> bool:
    print("waiting", flush=True)
    while not Path(path).exists():
        time.sleep(0.005)
    return True


def dies_at_first(path: str, times: int) -> int:
    marks = Path(path)
    died = len(marks.read_text()) if marks.exists() else 0
    if died < times:
        marks.write_text("x" * (died + 1))
        os._exit(9)
    return died
