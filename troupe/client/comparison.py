"""`Comparison`: how two jobs differ in their fields, scores and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from troupe.client.records import Job


@dataclass(frozen=True)
class Comparison:
    """Two jobs; what only one of them has is None for the other. `print` shows a table."""

    a: Job
    b: Job

    @property
    def fields(self) -> dict[str, tuple[Any, Any]]:
        """The fields of the specification that differ, by path, with both values."""
        ours, theirs = _leaves(self.a.spec), _leaves(self.b.spec)
        return {
            path: (ours.get(path), theirs.get(path))
            for path in sorted(ours.keys() | theirs.keys())
            if ours.get(path) != theirs.get(path)
        }

    @property
    def scores(self) -> dict[str, tuple[float | None, float | None]]:
        """The held-out scores after the last step, by name, of both jobs."""
        return _pairs(self.a.after, self.b.after)

    @property
    def metrics(self) -> dict[str, tuple[float | None, float | None]]:
        """The newest value of every metric of both jobs."""
        return _pairs(self.a.metrics, self.b.metrics)

    def __str__(self) -> str:
        rows = [("", self.a.id, self.b.id)]
        rows += [(name, _shown(a), _shown(b)) for name, (a, b) in self.fields.items()]
        rows.append(("step", str(self.a.step), str(self.b.step)))
        for name, pair in self.scores.items():
            intervals = self.a.after_intervals.get(name), self.b.after_intervals.get(name)
            texts = [
                _shown(value) + (f" [{one.low:.3f}, {one.high:.3f}]" if one else "")
                for value, one in zip(pair, intervals, strict=True)
            ]
            rows.append((name, texts[0], texts[1]))
        widths = [max(len(row[at]) for row in rows) for at in range(2)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows)


def _pairs(
    ours: Mapping[str, float], theirs: Mapping[str, float]
) -> dict[str, tuple[float | None, float | None]]:
    names = sorted(ours.keys() | theirs.keys())
    return {name: (ours.get(name), theirs.get(name)) for name in names}


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values of a specification by path; a list is one value."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    found: dict[str, Any] = {}
    for name, one in value.items():
        found |= _leaves(one, f"{path}.{name}" if path else name)
    return found


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) and abs(value) >= 0.001 else str(value)
