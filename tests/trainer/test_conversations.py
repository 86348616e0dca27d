"""Samples that carry each token once give the same training as whole samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.trainer.claims import StepClaims
from tests.support.training import make_rollout
from tests.trainer.stage import Trainer, TrainingStage
from troupe import prefixes
from troupe.v1 import experience_store_pb2 as store_pb

TURNS = 6


def turns_of(stage: TrainingStage) -> list[tuple[str, str, list[store_pb.Sample]]]:
    """(query, trajectory, samples) of conversations of cumulative turns, as whole samples."""
    draw, found = np.random.default_rng(0), []
    for query in ("q0", "q1"):
        for number in range(4):
            samples, said = list[store_pb.Sample](), [5]
            for turn in range(TURNS):
                prompt = said + draw.integers(0, 60, 12).tolist()
                response = draw.integers(0, 60, 10).tolist()
                said = prompt + response
                trajectory = f"{query}-s0-t{number}"
                samples.append(
                    make_rollout(
                        query,
                        trajectory,
                        turn=turn,
                        prompt=prompt,
                        response=response,
                        reward=float(number),
                    )
                )
            found.append((query, trajectory, samples))
    return found


def once(samples: list[store_pb.Sample]) -> list[store_pb.Sample]:
    """Return the samples as rollout sends them."""
    shared = prefixes.share([store_pb.ClaimedSample(sample=sample) for sample in samples])
    return [item.sample for item in shared]


@pytest.mark.parametrize("kept", [False, True])
async def test_weights_from_cut_conversations_equal_those_of_whole_samples(
    stage: TrainingStage, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Claims of seven samples cut conversations of six turns."""
    changes: dict[str, Any] = {
        "pipeline": {"steps": 10, "queries_per_step": 2, "micro_batch_samples": 7}
    }
    if kept:
        changes["state"] = {"every": 5}
    other, second = await stage.sibling()
    first = await stage.trainer()
    brought = list[int]()
    claim = StepClaims.claim

    async def counting(self: StepClaims, *args: Any) -> store_pb.ClaimMicroBatchResponse:
        found = await claim(self, *args)
        brought.append(len(found.stems))
        return found

    monkeypatch.setattr(StepClaims, "claim", counting)

    async def train(own: TrainingStage, trainer: Trainer, *, shared: bool) -> store_pb.StepCommit:
        await own.open()
        await trainer.bind(own.spec(**changes))
        for query, trajectory, samples in turns_of(own):
            rows = once(samples) if shared else samples
            assert any(row.HasField("stem") for row in rows) == shared
            await own.append(query, trajectory, rows)
        brought.clear()
        commit = await trainer.run(0, 0)
        assert commit.outcome == store_pb.STEP_OUTCOME_APPLIED
        assert commit.num_samples == 8 * TURNS
        assert bool(sum(brought)) == shared
        if kept:
            request = store_pb.ReadKeptRowsRequest(job_id=own.job_id, policy="solver", version=1)
            batches = [batch.samples async for batch in own.store.ReadKeptRows(request)]
            rows = [item.sample for batch in batches for item in batch]
            assert any(row.HasField("stem") for row in rows), "kept once, too"
            known = {row.sample_id: row for *_, some in turns_of(own) for row in some}
            for batch in batches:
                for item in prefixes.restore(batch):
                    whole = known.pop(item.sample.sample_id)
                    assert item.sample.prompt_ids == whole.prompt_ids
            assert not known
        return commit

    whole = await train(other, second, shared=False)
    parts = await train(stage, first, shared=True)
    assert parts.weights.checksum == whole.weights.checksum
    timed = ("seconds", "per_second", "bytes", "memory")
    for name, value in whole.metrics.items():
        if not any(word in name for word in timed):
            assert parts.metrics[name] == pytest.approx(value), name
