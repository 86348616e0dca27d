"""What is kept in Redis about a sample, an ending and a commit, and how it is written there.

Lua reads and writes the same text (lua/policy.lua): fields separated by tabs, in the order of
`Record`. Ids hold no control characters (requests.py), so nothing needs escaping.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from troupe import states
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb

REWARD: Final = "reward"

STATE_OF: Final[dict[str, pb.SampleState.ValueType]] = {
    "P": pb.SAMPLE_STATE_PENDING,
    "R": pb.SAMPLE_STATE_READY,
    "C": pb.SAMPLE_STATE_CLAIMED,
    "T": pb.SAMPLE_STATE_TRAINED,
    "D": pb.SAMPLE_STATE_DROPPED,
}
LETTER_OF: Final[dict[int, str]] = {state: letter for letter, state in STATE_OF.items()}


@dataclass(frozen=True)
class Record:
    """The bookkeeping of one sample: everything but its payload."""

    state: str
    """A key of `STATE_OF`."""
    tokens: str
    """Prompt and response together."""
    size: str
    """Bytes of the payload."""
    turn: str
    reward: str
    """As `repr` of the float, never parsed in Lua; empty until known."""
    missing: str
    """Required columns not there yet, joined by commas; `reward` is one of them."""
    early: str
    """Columns that came with the append, joined by commas."""
    late: str
    """Columns filled after the append, joined by commas."""
    query: str
    trajectory: str
    agent: str
    group: str
    reason: str
    """Why it was dropped."""

    def format(self) -> str:
        """The text that Redis holds."""
        return "\t".join(getattr(self, field.name) for field in fields(self))

    @staticmethod
    def parse(text: str) -> Record:
        """The record that `format` wrote."""
        return Record(*text.split("\t"))

    def apply_to(self, sample: store_pb.Sample) -> None:
        """Set on `sample` what moves after the append: its state and reward."""
        sample.state = STATE_OF[self.state]
        if self.reward:
            sample.reward = float(self.reward)

    def outline(self, sample_id: str, policy: str) -> store_pb.Sample:
        """The sample without its payload (which is freed when its step is committed)."""
        sample = store_pb.Sample(
            sample_id=sample_id,
            policy=policy,
            query_id=self.query,
            trajectory_id=self.trajectory,
            agent=self.agent,
            turn=int(self.turn),
            group_id=self.group,
        )
        self.apply_to(sample)
        return sample


@dataclass(frozen=True)
class Ending:
    """How a trajectory ended: decided once per job, carried out in every policy's table."""

    state: str
    attempt: str
    """Which append won; its rows are staged under this name until they are in the table."""
    query: str
    reason: str

    def format(self) -> str:
        """The text that Redis holds."""
        return "\t".join((self.state, self.attempt, self.query, self.reason))

    @staticmethod
    def parse(text: str) -> Ending:
        """The ending that `format` wrote."""
        return Ending(*text.split("\t"))


def commit_bytes(commit: store_pb.StepCommit) -> bytes:
    """What Redis holds of a commit; `num_samples` is put before it by the script."""
    return commit.SerializeToString(deterministic=True)


def parse_commit(stored: bytes) -> store_pb.StepCommit:
    """The commit whose stored form is `<number of samples> NEWLINE <bytes>`."""
    number, _, body = stored.partition(b"\n")
    commit = store_pb.StepCommit.FromString(body)
    commit.num_samples = int(number)
    return commit


def lua_transitions() -> str:
    """`states.SAMPLE` as a Lua table, so that the scripts obey the same one."""
    rows = []
    for source, targets in states.SAMPLE.items():
        moves = ", ".join(f"{LETTER_OF[target]} = true" for target in sorted(targets))
        rows.append(f"{LETTER_OF[source]} = {{{moves}}}")
    return f"local ALLOWED = {{{', '.join(rows)}}}\n"
