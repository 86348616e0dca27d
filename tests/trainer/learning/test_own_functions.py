"""A learner with users' own loss, correction and advantage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from tests.support.training import make_spec
from tests.trainer.batches import random_rows
from tests.trainer.learning.test_supervised import gradient
from tests.trainer.stage import TrainingStage
from troupe.job import JobSpecError, parse_job
from troupe.rpc import FailedPrecondition, InvalidArgument
from troupe.v1 import experience_store_pb2 as store_pb

OWN = "tests.support.own_algorithms"


def learner_of(tokenizer: Path, mode: str = "sync", **algorithm: Any) -> Learner:
    own = {k: f"{OWN}:{v.removeprefix('own ')}" for k, v in algorithm.items() if "own " in str(v)}
    pipeline = {"steps": 10, "queries_per_step": 2, "micro_batch_samples": 4, "mode": mode}
    spec = make_spec(tokenizer, algorithm=algorithm | own, pipeline=pipeline)
    model = load_model("solver", spec.policies["solver"], 0).double()
    return Learner(model, spec, "solver", forward_tokens=60)


PAIRS = [
    ({"loss": "own ppo"}, {}),
    ({"advantage": "own centred"}, {"advantage": "dr_grpo"}),
    ({"advantage": "own of_step"}, {"advantage": "reinforce_plus_plus"}),
]


@pytest.mark.parametrize(("own", "built_in"), PAIRS)
def test_a_user_function_equal_to_a_built_in_one_trains_the_same(
    tokenizer: Path, own: dict[str, str], built_in: dict[str, str]
) -> None:
    mine, theirs = learner_of(tokenizer, **own), learner_of(tokenizer, **built_in)
    rows = random_rows(mine.model, 1)
    torch.testing.assert_close(
        gradient(mine, rows, [4]), gradient(theirs, rows, []), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(
    "own",
    [
        {"loss": "own by_sample"},
        {"loss": "own cross_entropy"},
        {"correction": "own halved"},
        {"advantage": "own fading", "old_logprobs": "recomputed"},
    ],
)
def test_micro_batches_add_up_to_the_whole_step(tokenizer: Path, own: dict[str, str]) -> None:
    learner = learner_of(tokenizer, mode="micro_batch", **own)
    rows = random_rows(learner.model, 2)
    whole = gradient(learner, rows, [])
    assert float(whole.norm()) > 0
    for cuts in ([1, 3], [5], list(range(1, len(rows)))):
        # Layer norms round to float32, differently by pass.
        found = gradient(learner, rows, cuts)
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-6)


def test_a_fault_in_a_step_breaks_it_off_and_is_kept_over_a_suspension(tokenizer: Path) -> None:
    learner = learner_of(tokenizer, loss="own late")
    rows = random_rows(learner.model, 3)
    learner.accumulate(rows)
    tensors, values = learner.suspended()
    again = learner_of(tokenizer, loss="own late")
    again.adopt(tensors, values)
    for one in (learner, again):
        before = {name: tensor.clone() for name, tensor in one.weights().items()}
        outcome = one.apply(0)
        assert not outcome.applied
        assert outcome.fault == "algorithm.loss"
        assert f"{OWN}:late: its result" in outcome.reason
        assert all(torch.equal(before[name], t) for name, t in one.weights().items())


def test_whole_step_advantages_do_not_begin_early(tokenizer: Path) -> None:
    with pytest.raises(InvalidArgument, match="whole_step") as caught:
        learner_of(tokenizer, mode="micro_batch", advantage="own of_step")
    assert caught.value.field == "algorithm.advantage"


def test_an_unknown_loss_name_is_refused(tokenizer: Path) -> None:
    text = make_spec(tokenizer).model_dump_json()
    with pytest.raises(JobSpecError, match=r"algorithm\.loss.*is not one of ppo_clip") as caught:
        parse_job(text.replace('"ppo_clip"', '"ppo_clop"'))
    assert "package.module:function" in str(caught.value)
    with pytest.raises(JobSpecError, match=r"package\.module:attribute"):
        parse_job(text.replace('"ppo_clip"', '"ppo:clip:more"'))


async def test_a_step_fails_with_field_function_and_step(stage: TrainingStage) -> None:
    spec = stage.spec(algorithm={"loss": f"{OWN}:late"})
    trainer = await stage.trainer()
    await stage.open()
    await trainer.bind(spec)
    await stage.play(stage.first_model(spec))
    with pytest.raises(FailedPrecondition) as caught:
        await trainer.run(0, 0)
    error = caught.value
    assert (error.kind, error.field) == ("algorithm_function", "algorithm.loss")
    assert error.value == f"{OWN}:late"
    assert "step 1 of policy solver" in error.message
    # Nothing was counted: a resumed job trains the same samples.
    request = store_pb.GetStepRequest(job_id=stage.job_id, step=0)
    assert not (await stage.store.GetStep(request)).commits


async def test_bind_refuses_a_function_that_fails_on_the_example(stage: TrainingStage) -> None:
    trainer = await stage.trainer()
    with pytest.raises(InvalidArgument, match="detached") as caught:
        await trainer.bind(stage.spec(algorithm={"loss": f"{OWN}:detached"}))
    assert caught.value.field == "algorithm.loss"
