"""Experts divided over the ranks of a gang: the same step as one device or an undivided gang."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from services.trainer.gang.experts import check_divisible
from services.trainer.gang.gang import Gangs
from services.trainer.gang.learner import GangLearner
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_adapted, load_model, outline
from services.trainer.learning.samples import Row
from services.trainer.settings import TrainerSettings
from services.trainer.state.training_state import StateStore, TrainingState
from tests.support.architectures import ARCHITECTURES
from tests.support.training import make_spec, tiny_config
from tests.trainer.batches import Shape, random_rows
from tests.trainer.gang.test_gang import assert_close, assert_equal
from tests.trainer.gang.test_gang_memory import output_of_ranks
from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition

EXPERTS = 8
MIXTURE = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
}
HOW = {"double": False, "forward_tokens": 64, "share_prefixes": True}
# Gradients and losses agree to 1e-5; AdamW divides by their roots.
OPTIMIZER = {"lr": 1e-3, "eps": 1e-3, "max_grad_norm": 0.1}


def mixture_spec(
    tokenizer: Path,
    gang: int,
    divided: int | str,
    *,
    model: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **sections: Any,
) -> JobSpec:
    source = {"config": tiny_config() | (model or MIXTURE), "tokenizer": str(tokenizer)}
    sections = {"optimizer": OPTIMIZER} | sections
    values = make_spec(tokenizer, model=source, **sections).model_dump()
    own = {"gang": gang, "expert_parallel": divided} | (trainer or {})
    values["policies"]["solver"]["trainer"] |= own
    return JobSpec.model_validate(values)


def alone(spec: JobSpec) -> Learner:
    return Learner(load_model("solver", spec.policies["solver"], spec.seed), spec, "solver")


@pytest.fixture(scope="module")
def gangs() -> Iterator[dict[int, Gangs]]:
    some = {
        size: Gangs(TrainerSettings(trainer_device="cpu", gang_ranks=size, gang_timeout_seconds=90))
        for size in (2, 4)
    }
    yield some
    for one in some.values():
        one.close()


def routes_of(ids: np.ndarray[Any, Any], first: int = 0, experts: int = EXPERTS) -> Any:
    """Two of the `experts` from `first` on, for each token and layer, the same for the same
    prefix."""
    some = np.cumsum(ids) % experts
    both = np.stack([some, (some + 1 + ids % (experts - 1)) % experts], -1) + first
    return np.stack([both, both[:, ::-1]], 1).astype(np.uint8)


def step(learners: list[Any], rows: list[Row], version: int, tolerance: float = 1e-5) -> None:
    """Make one step with all learners; their metrics agree with the last one's."""
    outcomes = []
    for learner in learners:
        learner.accumulate(rows[:2])
        learner.accumulate(rows[2:])
        outcomes.append(learner.apply(version))
    theirs = outcomes[-1]
    assert theirs.applied, theirs.reason
    for ours in outcomes[:-1]:
        assert ours.applied, ours.reason
        for name, value in theirs.metrics.items():
            if name != "train/seconds":
                assert ours.metrics[name] == pytest.approx(value, rel=tolerance, abs=1e-6), name


@pytest.mark.parametrize(
    ("gang", "divided", "trainer"),
    [
        (2, 2, {"activation_checkpointing": False}),
        pytest.param(2, 2, {"activation_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param(4, 4, {"activation_checkpointing": True}, marks=pytest.mark.slow),
        # Two ranks have the same experts, and shard them.
        pytest.param(4, 2, {"activation_checkpointing": False}, marks=pytest.mark.slow),
        pytest.param(4, 2, {"activation_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param(4, 4, {"context_parallel": 2, "offload": "all"}, marks=pytest.mark.slow),
    ],
)
def test_ranks_with_some_of_the_experts_learn_what_one_device_does(
    tokenizer: Path, gangs: dict[int, Gangs], gang: int, divided: int, trainer: dict[str, Any]
) -> None:
    """With replayed routes, and the loss that evens out the load of experts."""
    algorithm = {"router_replay": True}
    if "context_parallel" not in trainer:
        algorithm |= {"router_aux_loss": 0.5}
    spec, plain = (
        mixture_spec(tokenizer, gang, n, trainer=trainer, algorithm=algorithm) for n in (divided, 1)
    )
    ours, sharded = (
        GangLearner(gangs[gang], f"job/{i}", one, "solver", HOW)
        for i, one in enumerate((spec, plain))
    )
    one = alone(plain)
    try:
        for version in range(2):
            rows = random_rows(one.model, version, Shape(groups=4, members=4))
            # After a step, weights differ by rounding, and so may routes among near equals.
            own = "q0" if version == 0 else "none"
            rows = [
                row if row.group.startswith(own) else replace(row, routes=routes_of(row.ids[:-1]))
                for row in rows
            ]
            step([ours, sharded, one], rows, version)
            assert_close(ours, one, 1e-5)
        # Published tensors have the names and shapes of a checkpoint.
        published = ours.published()
        assert "model.layers.0.mlp.experts.7.up_proj.weight" in published
        assert set(published) == set(one.published())
    finally:
        ours.release()
        sharded.release()


def test_a_rank_whose_experts_no_token_chooses_takes_part(
    tokenizer: Path, gangs: dict[int, Gangs]
) -> None:
    """All tokens go to the first rank's experts: none is dropped, and the others' get gradients of
    zero."""
    spec = mixture_spec(tokenizer, 2, 2, algorithm={"router_replay": True})
    ours, one = GangLearner(gangs[2], "job/uneven", spec, "solver", HOW), alone(spec)
    before = {name: tensor.clone() for name, tensor in one.weights().items()}
    try:
        rows = [
            replace(row, routes=routes_of(row.ids[:-1], 0, EXPERTS // 2))
            for row in random_rows(one.model, 0, Shape(groups=4, members=4))
        ]
        step([ours, one], rows, 0)
        assert_close(ours, one, 1e-5)
        stacked = "model.layers.0.mlp.experts.down_proj"
        pairs = zip(ours.weights()[stacked], before[stacked], strict=True)
        moved = [not torch.equal(a, b) for a, b in pairs]
        assert any(moved[: EXPERTS // 2])
        assert not any(moved[EXPERTS // 2 :])
    finally:
        ours.release()


@pytest.mark.slow
def test_state_goes_from_gangs_with_divided_experts_to_others_and_back(
    tokenizer: Path, tmp_path: Path, gangs: dict[int, Gangs]
) -> None:
    """Written state to a gang without it, to one device, and back; suspended within a step, too."""
    algorithm = {"router_replay": True, "kl_coefficient": 0.05}
    specs = [mixture_spec(tokenizer, 4, n, algorithm=algorithm) for n in (4, 1, 2, 4)]
    one = alone(specs[1])
    store = StateStore(tmp_path, "job", "solver")
    store.save(TrainingState(0, "a" * 32, one.snapshot()))
    one.load_reference(store.load(0))
    learner = None
    try:
        for version, spec in enumerate(specs):
            found = GangLearner(gangs[4], f"job/{version}", spec, "solver", HOW)
            found.load_reference(store.load(0))
            if learner is not None:
                store.save(TrainingState(version, "b" * 32, learner.snapshot()))
                learner.release()
                found.load(store.load(version))
            learner = found
            rows = [
                replace(row, routes=routes_of(row.ids[:-1]))
                for row in random_rows(one.model, version, Shape(groups=4, members=4))
            ]
            for part in (rows[:5], rows[5:]):
                for each in (learner, one):
                    each.accumulate(part)
                if version == 2:
                    tensors, values = learner.suspended()
                    learner.adopt(tensors, values)
            for each in (learner, one):
                outcome = each.apply(version)
                assert outcome.applied, outcome.reason
            assert_close(learner, one, 1e-5)
        assert learner is not None
        store.save(TrainingState(9, "c" * 32, learner.snapshot()))
        one.load(store.load(9))
        assert_equal(learner.weights(), one.weights())
        assert_equal(learner.published(), dict(one.published()))
    finally:
        if learner is not None:
            learner.release()


@pytest.mark.slow
def test_an_adapter_learns_over_divided_experts(tokenizer: Path, gangs: dict[int, Gangs]) -> None:
    lora = {"rank": 2, "alpha": 4}
    specs = []
    for gang, divided in ((2, 2), (1, 1)):
        spec = mixture_spec(tokenizer, gang, divided, algorithm={"router_replay": True})
        values = spec.model_dump()
        values["policies"]["solver"]["lora"] = lora
        specs.append(JobSpec.model_validate(values))
    ours = GangLearner(gangs[2], "job/adapted", specs[0], "solver", HOW)
    policy, cpu = specs[1].policies["solver"], torch.device("cpu")
    one = Learner(load_adapted("solver", policy, 0, cpu), specs[1], "solver")
    try:
        for version in range(2):
            rows = [
                replace(row, routes=routes_of(row.ids[:-1]))
                for row in random_rows(one.model, version, Shape(groups=4, members=4))
            ]
            step([ours, one], rows, version)
            assert_close(ours, one, 1e-5)
        assert ours.base is not None
        assert one.base is not None
        assert ours.base.checksum == one.base.checksum
    finally:
        ours.release()


@pytest.mark.parametrize(
    ("model", "divided", "message"),
    [
        ({"model_type": "qwen3"}, 2, "the model has no experts"),
        (MIXTURE | {"num_experts": 6}, 4, "4 of 4 ranks cannot divide the 6 experts"),
        (ARCHITECTURES["llama4"], 2, "does not compute its experts as one stacked module"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused_by_field(
    tokenizer: Path, model: dict[str, Any], divided: int, message: str
) -> None:
    spec = mixture_spec(tokenizer, 4, divided, model=model).policies["solver"]
    made = outline("solver", spec)
    with pytest.raises(FailedPrecondition, match=message) as refused:
        check_divisible("solver", spec, made, 4)
    assert refused.value.kind == "model_unsupported"
    assert refused.value.field == "policies.solver.trainer.expert_parallel"
    assert refused.value.value == str(divided)
    automatic = mixture_spec(tokenizer, 4, "auto", model=model).policies["solver"]
    found = check_divisible("solver", automatic, made, 4)
    assert found == (2 if model.get("num_experts") == 6 else 1)


def test_expert_parallelism_divides_the_gang(tokenizer: Path) -> None:
    with pytest.raises(ValidationError, match="expert_parallel is 3, which does not divide the 4"):
        mixture_spec(tokenizer, 4, 3)


@pytest.mark.slow
def test_every_stacked_architecture_computes_the_same_with_divided_experts() -> None:
    """Experts with biases, transposed or interleaved; the bytes that are gathered and sent."""
    output = output_of_ranks(2, "divided_rank")
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert {one["architecture"] for one in found} >= {"qwen3_moe", "gpt_oss", "mixtral"}
    for one in found:
        assert one["logits"] < 1e-5, one
        assert one["gradients"] < 1e-5, one
        # Experts are not gathered.
        assert one["gathered"] == one["gathered_whole"] - one["experts_bytes"], one
        # Of each of k experts a token's states, there and back, forward and backward.
        assert one["exchanged"] == one["pairs_bytes"] * 4, one
