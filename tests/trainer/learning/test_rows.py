"""Requirements of samples for training."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trainer.learning.model import load_model, positions_of
from services.trainer.learning.samples import parse_rows
from tests.support.training import VOCABULARY, make_rollout, make_spec, tiny_config
from troupe.rpc import FailedPrecondition
from troupe.v1 import experience_store_pb2 as store_pb


def claimed(tokens: int) -> store_pb.ClaimedSample:
    sample = make_rollout(
        "q0",
        "q0-s0-t0",
        policy="solver",
        turn=0,
        prompt=(5, 6, 7, 8),
        response=[9] * (tokens - 4),
        logprobs=[-1.0] * (tokens - 4),
        reward=1.0,
        version=0,
    )
    return store_pb.ClaimedSample(sample=sample, group_rewards=[1.0])


def test_a_sequence_over_the_models_limit_is_named(tokenizer: Path) -> None:
    config = tiny_config(max_position_embeddings=6)
    spec = make_spec(tokenizer, model={"config": config, "tokenizer": str(tokenizer)})
    longest = positions_of(load_model("solver", spec.policies["solver"], 0))
    (row,) = parse_rows([claimed(6)], VOCABULARY, longest=longest)
    assert len(row.ids) == 6
    with pytest.raises(FailedPrecondition) as refused:
        parse_rows([claimed(7)], VOCABULARY, longest=longest)
    assert (refused.value.kind, refused.value.field) == ("malformed_sample", "sample_id")
    assert "7 tokens" in refused.value.message
    assert "max_context" in (refused.value.remedy or "")
    parse_rows([claimed(7)], VOCABULARY)


def test_a_model_without_a_stated_limit_has_none() -> None:
    assert positions_of(object()) == 0
