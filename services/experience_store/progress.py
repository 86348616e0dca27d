"""How far a step is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.experience_store.records import Ending, parse_commit
from troupe.v1 import experience_store_pb2 as store_pb


@dataclass
class StepStatus:
    """What is known of one step of a job."""

    step: int
    open: bool
    query_ids: list[str] = field(default_factory=list)
    """In the order in which they came; without those that left."""
    versions: dict[str, int] = field(default_factory=dict)
    group_size: int = 0
    redundant: int = 0
    closed: bool = False
    """Whether the roster stays as it is."""
    cursor: int = 0
    expected: int = 0
    """Trajectories admitted, redundant ones and those of dropped queries too."""
    ended: int = 0
    """Those of them that ended; by the drop of their query too."""
    complete: int = 0
    """Queries all of whose trajectories have ended."""
    endings: dict[str, Ending] = field(default_factory=dict)
    """Trajectory -> ending, when asked for."""
    queries: list[store_pb.QueryStatus] = field(default_factory=list)
    """When asked for, in the order of `query_ids`."""
    counts: list[store_pb.PolicyCounts] = field(default_factory=list)
    commits: list[store_pb.StepCommit] = field(default_factory=list)

    @property
    def sealed(self) -> bool:
        """Whether all trajectories of the step have ended, and no more can come."""
        return self.open and self.closed and self.ended >= self.expected

    @property
    def ended_trajectories(self) -> list[str]:
        """Trajectories that ended by themselves, sorted: those of dropped queries, and redundant
        ones, have no name."""
        return sorted(name for name in self.endings if "\t" not in name)

    @staticmethod
    def parse(step: int, stored: Mapping[bytes, bytes]) -> StepStatus:
        """The status whose step hash (keys.JobKeys.step) is `stored`."""
        if not stored:
            return StepStatus(step, open=False)
        return StepStatus(
            step,
            open=True,
            query_ids=json.loads(stored[b"queries"]),
            versions=json.loads(stored[b"versions"]),
            group_size=int(stored[b"group_size"]),
            redundant=int(stored.get(b"redundant", 0)),
            closed=stored.get(b"held_open") != b"1",
            cursor=int(stored.get(b"cursor", 0)),
            expected=int(stored[b"expected"]),
            ended=int(stored[b"ended"]),
            complete=int(stored.get(b"complete", 0)),
        )

    def add_endings(self, endings: Mapping[bytes, bytes]) -> None:
        """Take in the hash of endings."""
        self.endings = {name.decode(): Ending.parse(e.decode()) for name, e in endings.items()}

    def add_table(self, policy: str, reply: Sequence[Any]) -> None:
        """Take in what one policy's table counts (lua/count.lua)."""
        counts, dropped, commit = reply
        self.counts.append(_policy_counts(policy, self.step, _pairs(counts), _pairs(dropped)))
        if commit:
            self.commits.append(parse_commit(commit))

    def add_queries(
        self, ended: Mapping[bytes, bytes], tallies: Sequence[Mapping[bytes, bytes]]
    ) -> None:
        """Take in trajectories ended per query, and what the tables tally per query."""
        total = Counter[str]()
        for tally in tallies:
            total.update({name.decode(): int(number) for name, number in tally.items()})
        for query in self.query_ids:
            trajectories = int(ended.get(query.encode(), 0))
            rows = total[f"{query}\trows"]
            self.queries.append(
                store_pb.QueryStatus(
                    query_id=query,
                    trajectories_ended=trajectories,
                    complete=trajectories >= self.group_size + self.redundant,
                    samples=rows,
                    kept=rows - total[f"{query}\tD"],
                    pending=total[f"{query}\tP"],
                )
            )


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _policy_counts(
    policy: str, step: int, counts: Mapping[bytes, bytes], dropped: Mapping[bytes, bytes]
) -> store_pb.PolicyCounts:
    def of(letter: bytes) -> int:
        return int(counts.get(letter, 0))

    return store_pb.PolicyCounts(
        policy=policy,
        step=step,
        pending=of(b"P"),
        ready=of(b"R"),
        claimed=of(b"C"),
        trained=of(b"T"),
        dropped=of(b"D"),
        drop_reasons={reason.decode(): int(number) for reason, number in dropped.items()},
        groups_without_signal=of(b"groups_without_signal"),
    )
