"""`Comparison`: how jobs differ in their fields, scores and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from troupe.client.records.jobs import Job


@dataclass(frozen=True)
class Comparison:
    """Two or more jobs; a value that a job does not have is None. `print` shows a table."""

    jobs: tuple[Job, ...]

    @property
    def fields(self) -> dict[str, tuple[Any, ...]]:
        """The fields of the specification that differ, by path, with the value of each job."""
        found = _aligned([_leaves(job.spec) for job in self.jobs])
        return {path: values for path, values in found.items() if _differ(values)}

    @property
    def scores(self) -> dict[str, tuple[float | None, ...]]:
        """The held-out scores after the last step, by name, of each job."""
        return _aligned([job.after for job in self.jobs])

    @property
    def metrics(self) -> dict[str, tuple[float | None, ...]]:
        """The newest value of every metric, by name, of each job."""
        return _aligned([job.metrics for job in self.jobs])

    def __str__(self) -> str:
        rows = [("", *(job.id for job in self.jobs))]
        rows += [(name, *map(_whole, values)) for name, values in self.fields.items()]
        rows.append(("step", *(str(job.step) for job in self.jobs)))
        for name, values in self.scores.items():
            intervals = [job.after_intervals.get(name) for job in self.jobs]
            texts = [
                _shown(value) + (f" [{one.low:.3f}, {one.high:.3f}]" if one else "")
                for value, one in zip(values, intervals, strict=True)
            ]
            rows.append((name, *texts))
        widths = [max(len(row[at]) for row in rows) for at in range(len(self.jobs) + 1)]
        return "\n".join(
            "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def _aligned(found: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    names = sorted({name for one in found for name in one})
    return {name: tuple(one.get(name) for one in found) for name in names}


def _differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values of a specification by path; a list is one value."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    found: dict[str, Any] = {}
    for name, one in value.items():
        found |= _leaves(one, f"{path}.{name}" if path else name)
    return found


def _whole(value: Any) -> str:
    """Return a field's value on one line, with all that differs."""
    return "-" if value is None else str(value).replace("\n", "\\n")


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) and abs(value) >= 0.001 else str(value)
