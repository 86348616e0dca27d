"""Conversations as rollout sends them, each token once, and the whole samples of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.experience import make_sample
from troupe import tensors
from troupe.prefixes import PrefixIndex
from troupe.v1 import experience_store_pb2 as store_pb


@dataclass(frozen=True)
class Said:
    """One turn: the turn that it follows, the length of their common beginning, its new tokens."""

    parent: int | None
    cut: int
    """Tokens of the parent that the prompt leaves out."""
    new: int
    reply: int
    policy: str = "solver"
    reward: float | None = 1.0


@dataclass
class Conversation:
    """The samples of one trajectory."""

    query: str
    trajectory: str
    samples: list[store_pb.Sample] = field(default_factory=list)
    """The samples as they are sent."""
    whole: dict[str, store_pb.Sample] = field(default_factory=dict)
    """The samples by id, as they would be without stems."""

    def __post_init__(self) -> None:
        self._index = PrefixIndex()
        self._tokens: list[list[int]] = []
        self._draw = np.random.default_rng(abs(hash(self.trajectory)) % 2**32)

    def say(self, said: Said, columns: dict[str, Any] | None = None) -> store_pb.Sample:
        """Add a turn; its sample as it is sent."""
        turn = len(self._tokens)
        before = [] if said.parent is None else self._tokens[said.parent]
        # Turns whose ids take two, three and four bytes each, in one conversation.
        bound = self._draw.choice([1000, 150_000, 2**30])
        fresh = self._draw.integers(0, bound, said.new + said.reply).tolist()
        tokens = [*before[: max(0, len(before) - said.cut)], *fresh]
        self._tokens.append(tokens)
        ids = np.array(tokens, np.int32)
        prompt, response = ids[: -said.reply], ids[-said.reply :]
        sample = make_sample(
            self.query,
            turn,
            self.trajectory,
            policy=said.policy,
            agent=said.policy,
            reward=said.reward,
        )
        sample.prompt_ids.CopyFrom(tensors.ids_to_proto(prompt))
        sample.response_ids.CopyFrom(tensors.ids_to_proto(response))
        sample.logprobs.CopyFrom(tensors.to_proto(np.zeros(len(response), np.float32)))
        for name, value in (columns or {}).items():
            sample.columns[name].tensor.CopyFrom(tensors.to_proto(value))
        whole = self.whole[sample.sample_id] = store_pb.Sample()
        whole.CopyFrom(sample)
        own = self._index.add(said.policy, turn, prompt, response, columns or {})
        if own.stem is not None:
            sample.stem.CopyFrom(own.stem)
            sample.prompt_ids.CopyFrom(tensors.ids_to_proto(own.prompt))
            for name in own.stem.columns:
                sample.columns[name].tensor.CopyFrom(tensors.to_proto(own.columns[name]))
        self.samples.append(sample)
        return sample


def cumulative(
    query: str, trajectory: str, turns: int, *, new: int = 40, reply: int = 40, **how: Any
) -> Conversation:
    """Return turns, each of which begins with all earlier ones."""
    made = Conversation(query, trajectory)
    for turn in range(turns):
        made.say(Said(turn - 1 if turn else None, 0, new, reply, **how))
    return made


def assert_same_ids(found: store_pb.Sample, wanted: store_pb.Sample) -> None:
    """Both have the same prompt and response, in however many bytes each id is."""
    for ids, theirs in (
        (found.prompt_ids, wanted.prompt_ids),
        (found.response_ids, wanted.response_ids),
    ):
        assert np.array_equal(tensors.from_proto(ids), tensors.from_proto(theirs))


def assert_same_tokens(
    found: Sequence[store_pb.Sample], wanted: dict[str, store_pb.Sample]
) -> None:
    """Every sample has the tokens and columns of the one that it stands for, checksums included."""
    for sample in found:
        whole = wanted[sample.sample_id]
        assert not sample.HasField("stem")
        assert_same_ids(sample, whole)
        assert set(sample.columns) == set(whole.columns)
        for name, column in sample.columns.items():
            assert column == whole.columns[name]
