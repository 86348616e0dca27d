"""One task instance, as a workflow sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from troupe.outcomes import NotFiniteError, finite_number, safe_text, utf8_text
from troupe.workflow.errors import WorkflowError


class Query(Mapping[str, Any]):
    """A read-only mapping over the task's data, with its identity beside it.

    The trajectories of a group share `data`: treat it as constant.
    """

    __slots__ = ("data", "id", "index", "metrics", "split")

    def __init__(self, id: str, split: str, index: int, data: Mapping[str, Any]) -> None:
        self.id = id
        """Name of the query inside its step, e.g. `q17`."""
        self.split = split
        """`train` or `held_out`."""
        self.index = index
        """Which item of the split."""
        self.data = data
        """What the job's tasks returned for this index."""
        self.metrics: dict[str, float] = {}
        """What this trajectory logged; see `log`."""

    def log(self, **values: float) -> None:
        """Note numbers about this trajectory; the job reports their means as metrics.

        Raises `WorkflowError` for a value that is not a finite number.
        """
        for name, value in values.items():
            try:
                self.metrics[utf8_text(name)] = finite_number(value)
            except NotFiniteError as error:
                raise WorkflowError(
                    f"query.log({safe_text(name)}=...) needs a finite number",
                    field=name,
                    value=value,
                    remedy="Log numbers only.",
                ) from error

    def __getitem__(self, key: str) -> Any:
        try:
            return self.data[key]
        except KeyError:
            known = ", ".join(sorted(map(str, self.data)))
            raise KeyError(f"query {self.id} has no {key!r}; it has: {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return f"Query({self.id}, {self.split}[{self.index}])"
