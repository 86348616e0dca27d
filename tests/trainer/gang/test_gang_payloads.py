"""A gang of two gloo ranks trains samples with payloads as one device does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.trainer.gang.gang import Gangs, encode_rows
from services.trainer.gang.learner import GangLearner
from services.trainer.gang.loads import LoadProgress
from services.trainer.gang.payloads import RankPayloads, StepPayloads
from services.trainer.learning.interface import PolicyLearner
from services.trainer.learning.learner import Learner
from services.trainer.learning.samples import Row
from services.trainer.settings import TrainerSettings
from services.trainer.state.suspension import pack_rows, unpack_rows
from services.trainer.state.training_state import StateStore, TrainingState
from tests.support.seeing_model import STAND_IN, TOKENS, payload, seeing_config
from tests.support.training import VOCABULARY, make_rollout
from tests.trainer.gang.test_gang import (
    alone,
    assert_close,
    gang_spec,
    together,
    whole_state,
)
from troupe.contracts.payloads import INLINE_BYTES, Payload, PlacedPayload, add_payloads
from troupe.job import JobSpec
from troupe.rpc import Aborted, FailedPrecondition, to_status
from troupe.transfer import Transfer
from troupe.v1 import experience_store_pb2 as store_pb

KEYS = "job/solver/payloads@"
# Passes of one row with payloads, or of several rows; rows with payloads are not cut.
SHORT = {"forward_tokens": 96, "share_prefixes": False}
PACKED = {"forward_tokens": 256, "share_prefixes": True}
# Passes that are shorter than the rows with payloads, on a CPU also when uncut.
CUT = {"forward_tokens": 24, "share_prefixes": True}
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3, "max_grad_norm": 1e9}
# Rows are held back until the step is complete.
HELD = {
    "algorithm": {"advantage": "reinforce_plus_plus"},
    "pipeline": {"mode": "sync", "steps": 10, "queries_per_step": 2, "micro_batch_samples": 4},
}
# Ranks import the model of these tests, as they would import one of transformers.
IMPORTING = """
import os, sys
if "RANK" in os.environ:
    import tests.support.seeing_model
"""


@pytest.fixture(scope="module")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "sitecustomize.py").write_text(IMPORTING)
    settings = TrainerSettings(
        trainer_device="cpu",
        gang_ranks=2,
        gang_timeout_seconds=60,
        transfer_dir=folder / "transfer",
    )
    some = Gangs(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[3]}")
        yield some
        some.close()


def seeing_spec(tokenizer: Path, **sections: Any) -> JobSpec:
    model = {"config": seeing_config(), "tokenizer": str(tokenizer)}
    return gang_spec(tokenizer, **{"model": model, "optimizer": OPTIMIZER, **sections})


class Claim:
    """Claimed samples of groups, whose prompts have payloads; some samples have large ones, by
    reference."""

    def __init__(self, groups: Mapping[str, Sequence[Payload]], members: int = 4) -> None:
        rng = np.random.default_rng(0)
        self.samples: list[store_pb.ClaimedSample] = []
        self._values: dict[str, Any] = {}
        for query, payloads in groups.items():
            prompt, placed = rng.integers(8, VOCABULARY, size=5).tolist(), []
            for content in payloads:
                placed.append(PlacedPayload(content, len(prompt), TOKENS))
                prompt += [STAND_IN] * TOKENS
            rewards = [float(member % 3) for member in range(members)]
            for member, reward in enumerate(rewards):
                response = rng.integers(VOCABULARY, size=3 + member).tolist()
                sample = make_rollout(
                    query,
                    f"{query}-t{member}",
                    prompt=[*prompt, 9],
                    response=response,
                    reward=reward,
                )
                add_payloads(sample, tuple(placed), self._ref_of)
                self.samples.append(store_pb.ClaimedSample(sample=sample, group_rewards=rewards))

    def _ref_of(self, content: Payload) -> str:
        key = f"values/{content.digest.hex()}"
        self._values[key] = np.frombuffer(content.data, np.uint8)
        return key

    def read(self, learner: PolicyLearner[Row]) -> Sequence[Row]:
        """Return the learner's rows."""
        return learner.read(self.samples, self._values.__getitem__)


# Three groups have payloads, of which two have one in common; two groups have none.
GROUPS = {
    "q0": (payload(1), payload(2)),
    "q1": (),
    "q2": (payload(1),),
    "q3": (),
    "q4": (payload(3, INLINE_BYTES + 1),),
}


def assert_same_step(gang: GangLearner, one: Learner, step: int) -> dict[str, float]:
    ours, theirs = gang.apply(step), one.apply(step)
    assert ours.applied, ours.reason
    assert ours.metrics.keys() == theirs.metrics.keys()
    for name, value in theirs.metrics.items():
        if name != "train/seconds":
            assert ours.metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert_close(gang, one, 1e-7)
    return theirs.metrics


@pytest.mark.parametrize("passes", [SHORT, PACKED], ids=["short", "packed"])
def test_two_ranks_learn_from_payloads_as_one_device_does(
    tokenizer: Path, tmp_path: Path, gangs: Gangs, passes: dict[str, Any]
) -> None:
    """Also if only one rank has payloads in a pass, in a micro-batch, or in none."""
    spec = seeing_spec(tokenizer, algorithm={"kl_coefficient": 0.1})
    gang, one = together(gangs, spec, **passes), alone(spec, **passes)
    store = StateStore(tmp_path, "job", "solver")
    store.save(TrainingState(0, "a" * 32, one.snapshot()))
    for learner in (gang, one):
        learner.load_reference(store.load(0))
    blind = alone(spec, **passes)
    blind.set_reference({name: t.clone() for name, t in one.weights().items()})
    claim = Claim(GROUPS)
    rows = claim.read(one)
    blind.accumulate([replace(row, payloads=()) for row in rows])
    unseen = blind.apply(0).metrics["loss/policy"]
    for step in range(2):
        for learner in (gang, one):
            found = claim.read(learner)
            assert [row.payloads for row in found] == [row.payloads for row in rows]
            learner.accumulate(found[:1])
            learner.accumulate(found[1:])
        assert gangs.transfer.keys(KEYS)
        seen = assert_same_step(gang, one, step)
        assert gangs.transfer.keys(KEYS) == []
        if not step:
            assert abs(seen["loss/policy"] - unseen) > 1e-6
    # Payloads alone reach the lens, whose gradient is the sum over ranks.
    plain = Claim({"q5": (), "q6": ()})
    for learner in (gang, one):
        learner.accumulate(plain.read(learner))
    assert_same_step(gang, one, 2)
    gang.release()


@pytest.mark.slow
def test_critics_of_two_ranks_see_payloads_as_one_device_does(
    tokenizer: Path, gangs: Gangs
) -> None:
    critic = {"optimizer": OPTIMIZER, "value_clip": 0.2}
    spec = seeing_spec(tokenizer, algorithm={"advantage": "gae", "critic": critic})
    gang, one = together(gangs, spec, **SHORT), alone(spec, **SHORT)
    for step in range(2):
        for learner in (gang, one):
            learner.accumulate(Claim(GROUPS).read(learner))
        assert_same_step(gang, one, step)
    gang.release()


def test_a_kind_that_the_model_of_a_gang_does_not_take_is_refused_as_by_one_device(
    tokenizer: Path, gangs: Gangs
) -> None:
    foreign = replace(payload(1), kind="image")
    seeing, blind = seeing_spec(tokenizer), gang_spec(tokenizer)
    for spec, sent in ((seeing, foreign), (blind, payload(1))):
        gang, one = together(gangs, spec, **SHORT), alone(spec, **SHORT)
        claim, refusals = Claim({"q0": (sent,)}), []
        for learner in (gang, one):
            with pytest.raises(FailedPrecondition) as refused:
                claim.read(learner)
            refusals.append(refused.value)
        mine, theirs = refusals
        assert mine.kind == "malformed_sample"
        assert f"takes no payload of kind {sent.kind}" in mine.message
        assert to_status(mine) == to_status(theirs)
        gang.release()


def test_a_step_with_payloads_moves_from_a_gang_to_one_device_and_back(
    tokenizer: Path, gangs: Gangs
) -> None:
    """Its rows are held back, and leave with the contents of their payloads."""
    spec = seeing_spec(tokenizer, **HELD)
    gang, one, still = together(gangs, spec, **SHORT), alone(spec, **SHORT), alone(spec, **SHORT)
    rows = Claim(GROUPS).read(one)
    for part in (rows[:9], rows[9:13], rows[13:]):
        still.accumulate(part)
    gang.accumulate(rows[:9])
    tensors, values = gang.suspended()
    assert gang.release() == []
    assert gangs.transfer.keys(KEYS) == []
    one.adopt(whole_state(gangs, tensors), values)
    one.accumulate(rows[9:13])
    tensors, values = one.suspended()
    gang.adopt({name: t.clone() for name, t in tensors.items()}, values)
    gang.accumulate(rows[13:])
    assert_same_step(gang, still, 0)
    gang.release()


def test_payloads_that_are_gone_end_the_step_and_not_the_gang(
    tokenizer: Path, gangs: Gangs
) -> None:
    spec = seeing_spec(tokenizer, **HELD)
    gang, one = together(gangs, spec, **SHORT), alone(spec, **SHORT)
    # One rank needs contents, and the other has rows without payloads.
    gang.accumulate(Claim(GROUPS).read(gang))
    assert gangs.transfer.clear(KEYS)
    with pytest.raises(Aborted) as gone:
        gang.complete()
    assert (gone.value.kind, gone.value.field) == ("payload_gone", "payloads")
    assert not gang.lost
    gang.discard()
    for learner in (gang, one):
        learner.accumulate(Claim(GROUPS).read(learner))
    assert_same_step(gang, one, 0)
    gang.release()


def test_a_row_with_payloads_that_is_longer_than_a_pass_is_refused_by_all_ranks(
    tokenizer: Path, gangs: Gangs
) -> None:
    spec = seeing_spec(tokenizer)
    gang, one = together(gangs, spec, **CUT), alone(spec, **CUT)
    refusals = []
    for learner in (gang, one):
        with pytest.raises(FailedPrecondition) as refused:
            learner.accumulate(Claim({"q0": (payload(1),), "q1": ()}).read(learner))
        refusals.append(refused.value)
        learner.discard()
    assert [one.kind for one in refusals] == ["payloads_cut"] * 2
    assert not gang.lost
    gang.accumulate(Claim({"q1": ()}).read(gang))
    assert gang.apply(0).applied
    gang.release()


def test_contents_of_payloads_go_to_ranks_by_key_and_once_per_step(tmp_path: Path) -> None:
    transfer = Transfer(tmp_path)
    there: Any = SimpleNamespace(set=transfer.set, delete=transfer.delete, holders=["host:1"])
    lead = StepPayloads(lambda: there, "job/solver")
    first, second = payload(1), payload(2, 3 * INLINE_BYTES)
    rows = [row_with(first), row_with(first, second), row_with()]
    sent, where = lead.store(rows)
    _, data = encode_rows(sent)
    assert len(data) < INLINE_BYTES
    assert [row.payloads for row in sent] == [row.payloads for row in rows]
    assert len(transfer.keys(KEYS)) == 2
    _, again = lead.store(rows[1:])
    assert again == where
    assert len(transfer.keys(KEYS)) == 2
    assert lead.store(rows[2:]) == (rows[2:], {})

    # A rank reads what it is asked for.
    rank, read = RankPayloads(), []
    rank.find(Reading(transfer, read), json.loads(json.dumps(where["payloads"])))
    (found,) = rank.filled([sent[0].payloads], LoadProgress())
    assert [one.payload.data for one in found] == [first.data]
    assert len(read) == 1
    (found,) = rank.filled([sent[1].payloads], LoadProgress())
    assert [one.payload.data for one in found] == [first.data, second.data]
    lead.drop()
    assert transfer.keys(KEYS) == []


def test_the_suspended_rows_of_a_group_have_the_content_of_a_payload_once() -> None:
    shared, own = payload(1, 1000), payload(2, 10)
    rows = [row_with(shared), row_with(shared, own, shared), row_with(), row_with(own)]
    tensors, described = pack_rows(rows)
    assert tensors["payloads"].nbytes == 1010
    found = unpack_rows(tensors, json.loads(json.dumps(described)))
    for mine, theirs in zip(found, rows, strict=True):
        assert mine.payloads == theirs.payloads
        contents = [[one.payload.data for one in row.payloads] for row in (mine, theirs)]
        assert contents[0] == contents[1]


class Reading:
    """A transfer layer of another host that notes the keys that are read."""

    def __init__(self, transfer: Transfer, read: list[str]) -> None:
        self._transfer, self._read = transfer, read

    def hint(self, key: str, holders: Sequence[str]) -> None:
        assert holders == ("host:1",)

    def get(self, key: str) -> Any:
        self._read.append(key)
        return self._transfer.get(key)


def row_with(*payloads: Payload) -> Row:
    """Return a row whose prompt has payloads."""
    ids, ones = np.full(TOKENS * len(payloads) + 5, 5), np.zeros(2, np.float32)
    row = Row("s", ids, len(ids) - 2, ones, 1.0, (1.0,), 0)
    placed = (PlacedPayload(one, i * TOKENS, TOKENS) for i, one in enumerate(payloads))
    return replace(row, payloads=tuple(placed))
