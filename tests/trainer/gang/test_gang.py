"""A gang of two gloo ranks: the mathematics of one device, and states for gangs of any size."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.gang.gang import (
    ALONE,
    Frame,
    GangHosts,
    Gangs,
    decode_rows,
    encode_rows,
)
from services.trainer.gang.group import share_of, spans
from services.trainer.gang.learner import GangLearner
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.learning.ranks import Stopped
from services.trainer.learning.samples import Row
from services.trainer.settings import TrainerSettings
from services.trainer.state.parts import PartsReader, StoredParts
from services.trainer.state.training_state import StateStore, TrainingState
from tests.support.training import make_rollout, make_spec, tiny_config
from tests.trainer.batches import Shape, random_rows
from tests.trainer.learning.test_learner import make_rows
from tests.trainer.learning.test_preferences import pairs_of
from troupe.job import JobSpec
from troupe.rpc import DataLoss, FailedPrecondition
from troupe.v1 import experience_store_pb2 as store_pb

# Each row is a separate pass: only its rank and the order of sums differ.
PLAIN = {"forward_tokens": 1, "share_prefixes": False}


def gang_spec(tokenizer: Path, size: int = 2, **sections: Any) -> JobSpec:
    values = make_spec(tokenizer, **sections).model_dump()
    values["policies"]["solver"]["trainer"]["gang"] = size
    return JobSpec.model_validate(values)


def alone(spec: JobSpec, **options: Any) -> Learner:
    """Return the same policy on one device, in float64."""
    model = load_model("solver", spec.policies["solver"], spec.seed)
    return Learner(model.double(), spec, "solver", **{**PLAIN, **options})


def together(
    gangs: Gangs, spec: JobSpec, *, key: str = "job/solver", **options: Any
) -> GangLearner:
    return GangLearner(gangs, key, spec, "solver", {"double": True, **PLAIN, **options})


def rows_of(spec: JobSpec, count: int, seed: int) -> list[Row]:
    model = load_model("solver", spec.policies["solver"], spec.seed)
    return make_rows(model, count, seed, noise=0.3)


def assert_close(gang: GangLearner, one: Learner, tolerance: float = 1e-10) -> None:
    for kind in ("weights", "moments"):
        mine, theirs = getattr(gang, kind)(), getattr(one, kind)()
        assert set(mine) == set(theirs)
        for name, tensor in theirs.items():
            torch.testing.assert_close(mine[name], tensor, rtol=tolerance, atol=tolerance)


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


def whole_state(gangs: Gangs, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join a state that a gang has suspended in parts, for one device; the parts are deleted."""
    stored = StoredParts.in_state(tensors)
    assert stored is not None
    found = {n: t.clone() for n, t in PartsReader(gangs.transfer, stored).whole().items()}
    for key in stored.keys:
        assert gangs.transfer.delete(key)
    return found


@pytest.fixture(scope="module")
def gangs() -> Iterator[Gangs]:
    some = Gangs(TrainerSettings(trainer_device="cpu", gang_ranks=2, gang_timeout_seconds=60))
    yield some
    some.close()


@given(lengths=st.lists(st.integers(1, 50), max_size=30), size=st.integers(1, 6))
def test_spans_cover_everything_once_and_evenly(lengths: list[int], size: int) -> None:
    found = spans(lengths, size)
    assert [i for span in found for i in span] == list(range(len(lengths)))
    for span in found:
        assert sum(lengths[i] for i in span) <= sum(lengths) / size + max(lengths, default=0)


@given(seed=st.integers(0, 999), count=st.integers(0, 12), size=st.integers(1, 4))
def test_every_row_goes_to_one_rank_in_whatever_order_rows_come(
    seed: int, count: int, size: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        Row(f"s{i}", rng.integers(9, size=4 + i % 5), 2, np.zeros(2, np.float32), 0.0, (0.0,), 0)
        for i in range(count)
    ]
    shares = [share_of(rows, rank, size) for rank in range(size)]
    assert sorted(i for share in shares for i in share) == list(range(count))
    shuffled = random.Random(seed).sample(rows, count)
    again = [{shuffled[i].ids.tobytes() for i in share_of(shuffled, r, size)} for r in range(size)]
    assert again == [{rows[i].ids.tobytes() for i in share} for share in shares]


def test_rows_cross_to_other_ranks_bit_for_bit(tokenizer: Path) -> None:
    rows = rows_of(make_spec(tokenizer), 5, 0)
    rows[0].behaviour[0] = np.nan
    header, body = encode_rows(rows)
    frame = Frame.decode(Frame({"rows": header}, body).encode())
    found = decode_rows(frame.header["rows"], frame.body)
    for mine, theirs in zip(rows, found, strict=True):
        assert mine.ids.tobytes() == theirs.ids.tobytes()
        assert mine.behaviour.tobytes() == theirs.behaviour.tobytes()
        assert (mine.sample_id, mine.reward) == (theirs.sample_id, theirs.reward)
        assert mine.group_rewards == theirs.group_rewards


def test_an_impossible_gang_is_refused() -> None:
    few = TrainerSettings(gang_ranks=2)
    Gangs(few).check("solver", 2)
    with pytest.raises(FailedPrecondition) as refused:
        Gangs(few).check("solver", 3)
    assert refused.value.kind == "gang_too_large"
    assert refused.value.field == "policies.solver.trainer.gang"
    assert "at most 2" in refused.value.message
    hosts = TrainerSettings(trainer_device="cpu", gang_ranks=2, gang_nodes=2)
    Gangs(hosts).check("solver", 4)
    with pytest.raises(FailedPrecondition, match="all of their 4"):
        Gangs(hosts).check("solver", 2)


def test_workers_of_one_machine_count_as_one_host() -> None:
    """If the ranks of a machine are neighbours, and all machines have the same number."""
    here = Gangs(TrainerSettings(advertise_address="a:1", trainer_device="cpu", gang_ranks=2))
    for members, hosts in (
        ((), 1),
        (("a:2",), 1),
        (("b:1",), 2),
        (("a:2", "b:1", "b:2"), 2),
        (("b:1", "a:2", "b:2"), 1),
        (("a:2", "b:1"), 1),
    ):
        assert here.hosts_of(GangHosts(members)) == hosts, members
    several = Gangs(TrainerSettings(trainer_device="cpu", gang_ranks=2, gang_nodes=4))
    assert several.hosts_of(ALONE) == 4


@pytest.mark.slow
def test_a_gang_learns_from_sharded_teachers_as_one_device_does(
    tokenizer: Path, gangs: Gangs
) -> None:
    values = gang_spec(
        tokenizer,
        frozen=("wise",),
        agents={name: {"policy": "solver"} for name in ("agent0", "agent1")},
        algorithm={"distillation": {"teachers": {"agent1": "wise"}}},
        optimizer={"lr": 1e-2, "eps": 1e-3, "max_grad_norm": 1e9},
    )
    packed = {"forward_tokens": 64, "share_prefixes": True}
    gang = GangLearner(gangs, "job/taught", values, "solver", {"double": True, **packed})
    one = alone(values)
    rows = random_rows(one.model, 4, Shape(groups=4, members=4))
    outcomes = []
    for learner in (gang, one):
        learner.accumulate(rows[:5])
        learner.accumulate(rows[5:])
        outcomes.append(learner.apply(0))
    assert outcomes[0].applied, outcomes[0].reason
    assert outcomes[0].metrics["distillation/kl"] == pytest.approx(
        outcomes[1].metrics["distillation/kl"]
    )
    # Layer norms round to float32, which differs between packings.
    assert_close(gang, one, tolerance=1e-6)
    gang.release()


@pytest.mark.slow
def test_a_gang_learns_preferences_as_one_device_does(
    tokenizer: Path, tmp_path: Path, gangs: Gangs
) -> None:
    """Also if one rank has the chosen replies and another the rejected ones, or none."""
    spec = gang_spec(
        tokenizer,
        preferences={"tasks": {"source": "nowhere:rows"}, "steps": 4},
        optimizer={"lr": 1e-2, "eps": 1e-3, "max_grad_norm": 1e9},
    )
    gang, one = together(gangs, spec), alone(spec)
    store = StateStore(tmp_path, "job", "solver")
    store.save(TrainingState(0, "a" * 32, one.snapshot()))
    for learner in (gang, one):
        learner.load_reference(store.load(0))
    for step in range(3):
        rows = pairs_of(step, 4)
        for learner in (gang, one):
            learner.accumulate(rows[:1])
            learner.accumulate(rows[1:2])
            learner.accumulate(rows[2:])
        ours, theirs = gang.apply(step), one.apply(step)
        assert (ours.applied, ours.digest) == (theirs.applied, theirs.digest), ours.reason
        for name in ("preference/loss", "preference/accuracy", "preference/margin", "grad_norm"):
            assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-6), name
    assert theirs.metrics["preference/loss"] < 0.7
    assert_close(gang, one, 1e-8)
    gang.release()


@pytest.mark.slow
def test_a_gang_exchanges_the_sums_of_joint_pairs_as_one_device_does(
    tokenizer: Path, tmp_path: Path, gangs: Gangs
) -> None:
    spec = gang_spec(
        tokenizer,
        policies=("checker", "solver"),
        preferences={"tasks": {"source": "nowhere:rows"}, "steps": 4, "joint": True},
        optimizer={"lr": 1e-2, "eps": 1e-3, "max_grad_norm": 1e9},
    )
    gang, one = together(gangs, spec), alone(spec)
    store = StateStore(tmp_path, "job", "solver")
    store.save(TrainingState(0, "a" * 32, one.snapshot()))
    for learner in (gang, one):
        learner.load_reference(store.load(0))
    for step in range(3):
        rows = [replace(row, joint_policies=2) for row in pairs_of(step, 4)]
        sums = []
        for learner in (gang, one):
            learner.accumulate(rows[:3])
            learner.accumulate(rows[3:])
            sums.append(learner.pair_sums())
        for mine, other in zip(sums[0].pairs, sums[1].pairs, strict=True):
            assert mine.pair == other.pair
            assert mine.chosen == pytest.approx(other.chosen, rel=1e-9, abs=1e-12)
            # With what the other policy has added.
            other.chosen, other.policies = other.chosen + 0.5, 2
        for learner in (gang, one):
            learner.join_pairs(sums[1])
        ours, theirs = gang.apply(step), one.apply(step)
        assert (ours.applied, ours.digest) == (theirs.applied, theirs.digest), ours.reason
        for name in ("preference/loss", "preference/accuracy", "preference/margin", "grad_norm"):
            assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-6), name
    assert_close(gang, one, 1e-8)
    gang.release()


def test_a_fault_of_a_users_loss_on_one_rank_is_reported_by_the_gang(
    tokenizer: Path, gangs: Gangs
) -> None:
    """The rank without such a row takes part in all passes; the other rank gives the reason."""
    own = "tests.support.own_algorithms:fails_on_nine"
    spec = gang_spec(tokenizer, algorithm={"loss": own})
    gang = together(gangs, spec)
    rows = rows_of(spec, 6, 0)
    marked = next(i for i in share_of(rows, 1, 2) if rows[i].response_length)
    rows[marked].behaviour[:] = -9.0
    gang.accumulate(rows)
    outcome = gang.apply(0)
    assert (outcome.applied, outcome.fault) == (False, "algorithm.loss")
    assert outcome.reason.startswith(own)
    gang.accumulate(rows_of(spec, 6, 1))
    assert gang.apply(0).applied
    gang.release()


def test_packed_rows_of_a_gang_give_what_single_rows_give(
    tokenizer: Path, tmp_path: Path, gangs: Gangs
) -> None:
    """As in jobs: many rows in one sequence, prefixes once; for the frozen reference, too."""
    algorithm = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}
    # A step far larger than the effect of the layer norms' rounding on Adam.
    optimizer = {"lr": 1e-2, "eps": 1e-3, "max_grad_norm": 1e9}
    spec = gang_spec(tokenizer, algorithm=algorithm, optimizer=optimizer)
    packed = {"forward_tokens": 256, "share_prefixes": True}
    gang = GangLearner(gangs, "job/packed", spec, "solver", {"double": True, **packed})
    one = alone(spec)
    store = StateStore(tmp_path, "job", "solver")
    store.save(TrainingState(0, "a" * 32, one.snapshot()))
    for learner in (gang, one):
        learner.load_reference(store.load(0))
    for step in range(2):
        rows = random_rows(one.model, step, Shape(groups=4, members=6, prompt=12))
        for learner in (gang, one):
            learner.accumulate(rows)
        ours, theirs = gang.apply(step), one.apply(step)
        assert (ours.applied, ours.digest) == (theirs.applied, theirs.digest)
        for name in ("kl", "entropy", "grad_norm", "loss/policy"):
            assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-5), name
    assert theirs.metrics["kl"] > 0
    assert_close(gang, one, 1e-6)


def test_the_leader_of_a_gang_reads_samples_without_the_model(
    tokenizer: Path, gangs: Gangs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole model may not fit, and would be made again for every claim."""
    config = tiny_config(max_position_embeddings=6)
    spec = gang_spec(tokenizer, model={"config": config, "tokenizer": str(tokenizer)})
    gang = together(gangs, spec)
    monkeypatch.setattr("services.trainer.learning.model._load", None)
    fits, longer = (
        store_pb.ClaimedSample(sample=make_rollout("q", "t", response=[8] * length, reward=1.0))
        for length in (3, 4)
    )
    assert [row.size for row in gang.read([fits], lambda _: np.empty(0))] == [6]
    with pytest.raises(FailedPrecondition, match="positions for 6"):
        gang.read([longer], lambda _: np.empty(0))


def test_a_gang_publishes_experts_as_checkpoints_have_them(tokenizer: Path, gangs: Gangs) -> None:
    mixture = {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    model = {"config": tiny_config() | mixture, "tokenizer": str(tokenizer)}
    spec = gang_spec(tokenizer, model=model)
    gang, one = together(gangs, spec), alone(spec)
    found = gang.published()
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in found
    assert_equal(found, dict(one.published()))
    # The model keeps its own state.
    assert_equal(gang.weights(), one.weights())
    gang.release()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_two_ranks_of_a_mixture_learn_what_one_does(
    tokenizer: Path, gangs: Gangs, checkpointed: bool
) -> None:
    """Sharded experts, clipped gradients, the load of experts and the loss that evens it out, and
    replayed routes of some rows. In float32, which grouped products of experts need."""
    mixture = {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "initializer_range": 0.3,
    }
    model = {"config": tiny_config() | mixture, "tokenizer": str(tokenizer)}
    algorithm = {"router_aux_loss": 0.5, "router_replay": True}
    optimizer = {"lr": 1e-3, "eps": 1e-3, "max_grad_norm": 0.1}
    values = make_spec(
        tokenizer, model=model, algorithm=algorithm, optimizer=optimizer
    ).model_dump()
    values["policies"]["solver"]["trainer"] |= {
        "gang": 2,
        "activation_checkpointing": checkpointed,
    }
    spec = JobSpec.model_validate(values)
    how = {"double": False, "forward_tokens": 64, "share_prefixes": True}
    key = f"job/mixed-{checkpointed}"
    gang = GangLearner(gangs, key, spec, "solver", how)
    one = Learner(load_model("solver", spec.policies["solver"], spec.seed), spec, "solver")
    for step in range(2):
        rows = random_rows(one.model, step, Shape(groups=4, members=4))
        rows = [
            row if row.group.startswith("q0") else replace(row, routes=_routes(row.ids[:-1]))
            for row in rows
        ]
        outcomes = []
        for learner in (gang, one):
            learner.accumulate(rows[:2])
            learner.accumulate(rows[2:])
            outcomes.append(learner.apply(step))
        ours, theirs = outcomes
        assert ours.applied
        assert {name for name in theirs.metrics if name.startswith("router/")} >= {
            "router/aux_loss",
            "router/load_max",
            "router/replayed_fraction",
        }
        assert theirs.metrics["grad_norm"] > 0.1  # clipped
        for name, value in theirs.metrics.items():
            if name != "train/seconds":
                assert ours.metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-6), name
        assert_close(gang, one, 2e-5)
    gang.release()


def _routes(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Two of four experts for each token and layer, the same for the same prefix."""
    first = np.cumsum(ids) % 4
    both = np.stack([first, (first + 1 + ids % 3) % 4], -1)
    return np.stack([both, both[:, ::-1]], 1).astype(np.uint8)


def test_two_ranks_learn_what_one_does(tokenizer: Path, tmp_path: Path, gangs: Gangs) -> None:
    """Steps, a state in parts and back, a suspension within a step, and a stop, all on one gang."""
    algorithm = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}
    spec = gang_spec(tokenizer, algorithm=algorithm)
    gang, one = together(gangs, spec), alone(spec)
    assert (gang.vocabulary, gang.num_parameters) == (one.vocabulary, one.num_parameters)
    assert_equal(gang.weights(), one.weights())
    store = StateStore(tmp_path, "job", "solver")
    store.save(TrainingState(0, "a" * 32, one.snapshot()))
    for learner in (gang, one):
        learner.load_reference(store.load(0))
    for step in range(2):
        for part in range(2):
            # An odd number of rows, and one row alone: ranks have different numbers of passes.
            rows = rows_of(spec, 7 if part else 1, 2 * step + part)
            for learner in (gang, one):
                learner.accumulate(rows)
        ours, theirs = gang.apply(step), one.apply(step)
        assert (ours.applied, ours.digest) == (theirs.applied, theirs.digest)
        for name, value in theirs.metrics.items():
            if name != "train/seconds":
                assert ours.metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
        assert_close(gang, one)
    assert {t.dtype for t in gang.published().values()} == {torch.float32}

    # In parts on the disk; whole when one device reads it.
    weights, moments = gang.weights(), gang.moments()
    path = store.save(TrainingState(2, "c" * 32, gang.snapshot()))
    assert len(list(path.glob("shard-*"))) == 2
    read = store.load(2)
    assert_equal(read.weights, weights)
    assert_equal(read.moments, moments)
    one.load(read)

    # Suspended in the middle of a step, resumed on one device, and back.
    rows = rows_of(spec, 6, 9)
    gang.accumulate(rows[:4])
    tensors, values = gang.suspended()
    assert gang.release() == []
    one.adopt(whole_state(gangs, tensors), values)
    tensors, values = one.suspended()
    gang.adopt(tensors, values)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        gang.accumulate(rows[4:], stop)
    gang.adopt(tensors, values)
    for learner in (gang, one):
        learner.accumulate(rows[4:])
        assert learner.apply(2).metrics["samples"] == 6
    assert_close(gang, one)

    # Back to the saved state, read in parts.
    gang.load(store.load(2))
    assert_equal(gang.weights(), weights)
    assert_equal(gang.moments(), moments)
    store.save(TrainingState(3, "d" * 32, one.snapshot()))
    gang.load(store.load(3))
    assert_equal(gang.weights(), one.weights())
    assert_equal(gang.moments(), one.moments())

    # A changed byte.
    damaged = next(path.glob("shard-00002-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    with pytest.raises(DataLoss, match="checksums"):
        store.load(2)
