"""Functions that need something of others: an interface with a quota, a model on devices."""

from __future__ import annotations

import time
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

from troupe.functions.models import ask_model, model_url


def notes(path: str, what: str = "called", seconds: float = 0.0) -> str:
    """Leaves the time at which it was called."""
    with Path(path).open("a") as log:
        log.write(f"{what} {time.time()}\n")
    time.sleep(seconds)
    return what


def held(path: str) -> None:
    """Ends when there is a file."""
    while not Path(path).exists():
        time.sleep(0.01)


class RateLimited(Exception):
    """Raise the error of httpx, requests and OpenAI's client."""

    def __init__(self, after: str | None) -> None:
        super().__init__("429 Too Many Requests")
        headers = {} if after is None else {"retry-after": after}
        self.response = SimpleNamespace(status_code=429, headers=headers)


def refused_once(path: str, after: str = "0.4") -> str:
    """The interface refuses the first call."""
    first = not Path(path).exists()
    notes(path)
    if first:
        raise RateLimited(after)
    return "done"


def refused(after: str | None = None, date_in: float | None = None) -> None:
    raise RateLimited(after if date_in is None else formatdate(time.time() + date_in, usegmt=True))


def looks_at_model() -> str:
    """The model is awake, and where it should be."""
    with urlopen(f"{model_url()}/health", timeout=10) as reply:
        assert reply.status == 200
    return model_url()


def judges(ids: list[int]) -> float:
    return float(ask_model("score", ids=ids))
