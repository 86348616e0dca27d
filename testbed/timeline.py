"""Timelines: spans in which a lane was busy, one JSON object per line."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

# Lines that may wait in memory: files are written seldom, and read only after an end.
_FLUSH_SECONDS = 1.0


@dataclass(frozen=True)
class TimelineSpan:
    """A span in which `lane` did `what` for `policy`, from `start` to `end` (wall clock seconds).

    `level`: an engine's mean number of running turns, or a trainer's tokens.
    """

    lane: str
    what: str
    policy: str
    start: float
    end: float
    level: float = 0.0


class Timeline:
    """A writer of spans to `{directory}/{name}.jsonl`; it does nothing without a directory."""

    def __init__(self, directory: Path | None, name: str) -> None:
        self._lines: list[str] = []
        self._flushed = time.monotonic()
        self._path = None if directory is None else directory / f"{name}.jsonl"
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def wanted(self) -> bool:
        """Whether spans are written to a file."""
        return self._path is not None

    def add(self, span: TimelineSpan) -> None:
        """Record a span; it is in the file a second later or after `flush`."""
        if self._path is None:
            return
        self._lines.append(json.dumps(vars(span)))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write buffered spans to the file."""
        if self._path is not None and self._lines:
            with self._path.open("a") as file:
                file.write("".join(line + "\n" for line in self._lines))
        self._lines.clear()
        self._flushed = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.flush()


def read_spans(directory: Path) -> list[TimelineSpan]:
    """Return the spans of all files in `directory`, ordered by start; incomplete lines are left
    out."""
    spans = []
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError, TypeError):
                spans.append(TimelineSpan(**json.loads(line)))
    return sorted(spans, key=lambda span: span.start)


def busy_within(spans: Iterable[TimelineSpan], start: float, end: float) -> float:
    """Return the seconds of [start, end] that the union of `spans` covers."""
    return sum(until - since for since, until in union(spans, start, end))


def union(spans: Iterable[TimelineSpan], start: float, end: float) -> Iterator[tuple[float, float]]:
    """Yield the union of `spans` within [start, end], as disjoint intervals in order."""
    since = until = start
    for span in sorted(spans, key=lambda span: span.start):
        left, right = max(span.start, start), min(span.end, end)
        if right <= left:
            continue
        if left > until:
            if until > since:
                yield since, until
            since, until = left, right
        else:
            until = max(until, right)
    if until > since:
        yield since, until
