"""On-policy distillation against a plain implementation: one row, one forward pass per model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.learning.samples import Row
from tests.support.seeing_model import KIND, seeing_config
from tests.support.training import make_spec, tiny_config
from tests.trainer.batches import Shape, random_rows, response_logprobs
from troupe.job import JobSpec, JobSpecError, parse_job
from troupe.job.sizing import setup_of, shape_of_config
from troupe.rpc import FailedPrecondition, InvalidArgument
from troupe.scheduling.memory import rank_memory

TEACHERS = {"agent0": "wise", "agent1": "wiser"}
SHAPE = Shape(groups=5, members=5, response=12)


def spec_of(tokenizer: Path, teachers: dict[str, str] | None = None, **given: Any) -> JobSpec:
    """Two agents of one policy; `wiser` is another architecture, and knows more tokens."""
    algorithm = {
        "distillation": {"teachers": teachers or TEACHERS, "coefficient": 0.7, **given},
        "advantage": "dr_grpo",
    }
    values = make_spec(
        tokenizer,
        frozen=("wise", "wiser"),
        agents={name: {"policy": "solver"} for name in ("agent0", "agent1")}
        | {name: {"policy": name} for name in ("wise", "wiser")},
        algorithm=algorithm,
    ).model_dump()
    larger = tiny_config(hidden_size=48, vocab_size=80)
    values["policies"]["wiser"]["model"]["config"] = larger
    return JobSpec.model_validate(values)


def model_of(spec: JobSpec, policy: str) -> Any:
    return load_model(policy, spec.policies[policy], spec.seed).double()


def learner_of(spec: JobSpec, **options: Any) -> Learner:
    return Learner(model_of(spec, "solver"), spec, "solver", **{"forward_tokens": 90, **options})


def gradient(learner: Learner, rows: list[Row], cuts: list[int]) -> torch.Tensor:
    for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        learner.accumulate(rows[start:stop])
    learner.complete()
    found = [p.grad for p in learner.model.parameters() if p.grad is not None]
    return torch.cat([one.flatten() for one in found])


def log_softmaxes(model: Any, row: Row) -> torch.Tensor:
    """[response_len, V]"""
    ids = torch.from_numpy(row.ids)
    logits = model(ids[None]).logits[0, row.prompt_length - 1 : -1] / row.temperature
    return torch.log_softmax(logits[:, :64], -1)


def plain_gradient(
    spec: JobSpec, rows: list[Row], *, full: bool, rewards: bool
) -> tuple[torch.Tensor, float]:
    """Return the gradient of the summed loss, and the mean divergence (or its estimate)."""
    model = model_of(spec, "solver")
    teachers = {name: model_of(spec, name).requires_grad_(False) for name in ("wise", "wiser")}
    distillation = spec.algorithm.distillation
    assert distillation is not None
    total, divergence, tokens = torch.zeros((), dtype=torch.float64), 0.0, 0
    for row in rows:
        if not row.response_length:
            continue
        logprobs, _ = response_logprobs(model, row)
        behaviour = torch.from_numpy(row.behaviour).double()
        advantage = torch.zeros(row.response_length, dtype=torch.float64)
        teacher = distillation.teachers.get(row.agent)
        if rewards or teacher is None:
            advantage += row.reward - sum(row.group_rewards) / len(row.group_rewards)
        if teacher is not None:
            theirs = log_softmaxes(teachers[teacher], row)
            mine = log_softmaxes(model, row)
            kl = (mine.exp() * (mine - theirs)).sum(-1)
            if full:
                total = total + 0.7 * kl.sum()
                divergence += float(kl.detach().sum())
            else:
                chosen = theirs.gather(1, torch.from_numpy(row.ids)[row.prompt_length :, None])[
                    :, 0
                ]
                # In the column's form.
                gap = chosen.float().double() - behaviour
                advantage = advantage + 0.7 * gap
                divergence -= float(gap.detach().sum())
            tokens += row.response_length
        ratio = (logprobs - behaviour).exp()
        clipped = ratio.clamp(0.8, 1.2)
        total = total - torch.minimum(ratio * advantage, clipped * advantage).sum()
    torch.autograd.backward(total)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([one.flatten() for one in grads]), divergence / tokens


def with_columns(spec: JobSpec, rows: list[Row]) -> list[Row]:
    """Return rows with the log-probs of the teachers' engines."""
    distillation = spec.algorithm.distillation
    assert distillation is not None
    taught = []
    for row in rows:
        teacher = distillation.teachers.get(row.agent)
        if teacher is not None:
            table = log_softmaxes(model_of(spec, teacher), row)
            ids = torch.from_numpy(row.ids)[row.prompt_length :, None]
            row = replace(row, teacher=table.gather(1, ids)[:, 0].detach().float().numpy())
        taught.append(row)
    return taught


@pytest.mark.parametrize("rewards", [False, True])
@pytest.mark.parametrize("divergence", ["full", "sampled"])
@pytest.mark.parametrize("teachers", [TEACHERS, {"agent1": "wise"}])
def test_distillation_gradients_equal_the_plain_ones(
    tokenizer: Path, teachers: dict[str, str], divergence: str, rewards: bool
) -> None:
    spec = spec_of(tokenizer, teachers, divergence=divergence, rewards=rewards)
    learner = learner_of(spec)
    rows = random_rows(learner.model, 7, SHAPE)
    if divergence == "sampled":
        rows = with_columns(spec, rows)
    expected, mean = plain_gradient(spec, rows, full=divergence == "full", rewards=rewards)
    for cuts in ([], [3, 4], [9]):
        found = gradient(learner, rows, cuts)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        metrics = learner.apply(0).metrics
        assert metrics["distillation/kl"] == pytest.approx(mean, rel=1e-5)
        learner = learner_of(spec)


def test_threads_and_padded_rows_compute_the_same(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(tokenizer)
    rows = random_rows(model_of(spec, "solver"), 8, SHAPE)
    expected, _ = plain_gradient(spec, rows, full=True, rewards=False)
    monkeypatch.setattr("services.trainer.learning.passes.worth_splitting", lambda *_: True)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    threaded = learner_of(spec)
    torch.testing.assert_close(gradient(threaded, rows, []), expected, rtol=1e-5, atol=1e-7)
    monkeypatch.undo()
    # Models whose logits do not come from a linear layer, and that cannot be packed.
    plain = learner_of(spec)
    for forward in (plain._passes._forward, *plain._passes._teachers.values()):
        forward.capabilities = replace(forward.capabilities, packs=False, linear_head=False)
    torch.testing.assert_close(gradient(plain, rows, [4]), expected, rtol=1e-5, atol=1e-7)


def test_a_student_becomes_its_teacher(tokenizer: Path) -> None:
    """Without any reward, the divergence on its own samples falls to a small part."""
    spec = spec_of(tokenizer, {"agent0": "wise", "agent1": "wise"})
    learner = Learner(load_model("solver", spec.policies["solver"], 0), spec, "solver")
    seen = []
    few = Shape(groups=2, members=3, response=6)
    rows = [replace(row, reward=0.0) for row in random_rows(learner.model, 5, few)]
    for step in range(30):
        learner.accumulate(rows)
        outcome = learner.apply(step)
        assert outcome.applied, outcome.reason
        seen.append(outcome.metrics["distillation/kl"])
    assert seen[-1] < 0.2 * seen[0]


def test_a_sample_without_its_teachers_column_is_a_fault(tokenizer: Path) -> None:
    learner = learner_of(spec_of(tokenizer, divergence="sampled"))
    with pytest.raises(FailedPrecondition, match="teacher_logprobs"):
        learner.accumulate(random_rows(learner.model, 9))


def test_a_teacher_must_know_the_students_tokens(tokenizer: Path) -> None:
    values = spec_of(tokenizer).model_dump()
    values["policies"]["wise"]["model"]["config"]["vocab_size"] = 60
    spec = JobSpec.model_validate(values)
    with pytest.raises(InvalidArgument, match="60 token embeddings") as caught:
        learner_of(spec)
    assert caught.value.field == "policies.wise.model"


@pytest.mark.parametrize(
    ("seeing", "kinds"), [(("solver", "wise", "wiser"), {KIND}), (("solver", "wise"), set())]
)
def test_samples_may_have_payloads_that_the_student_and_all_teachers_take(
    tokenizer: Path, seeing: tuple[str, ...], kinds: set[str]
) -> None:
    values = spec_of(tokenizer).model_dump()
    for name in seeing:
        values["policies"][name]["model"]["config"] |= {"model_type": seeing_config()["model_type"]}
    learner = learner_of(JobSpec.model_validate(values))
    assert learner._passes.payload_kinds == kinds


WRONG = [
    ({"algorithm": {"distillation": {"teachers": {"nobody": "wise"}}}}, "job has no such agent"),
    ({"algorithm": {"distillation": {"teachers": {"agent0": "nobody"}}}}, "is not a policy"),
    ({"algorithm": {"distillation": {"teachers": {"agent0": "solver"}}}}, "'solver' is trained"),
    ({"algorithm": {"distillation": {"teachers": {"wise": "wiser"}}}}, "'wise' is frozen"),
    ({"algorithm": {"distillation": {"teachers": {}}}}, "at least 1"),
    ({"pipeline": {"dynamic_sampling": True}}, "pipeline.dynamic_sampling"),
]


@pytest.mark.parametrize(("change", "why"), WRONG)
def test_impossible_distillation_is_refused(
    tokenizer: Path, change: dict[str, Any], why: str
) -> None:
    values = spec_of(tokenizer).model_dump(mode="json")
    for section, fields in change.items():
        values[section] |= fields
    with pytest.raises(JobSpecError, match=why):
        parse_job(json.dumps(values))


def test_memory_counts_teachers(tokenizer: Path) -> None:
    with_them = spec_of(tokenizer)
    shape = shape_of_config(with_them.policies["solver"].language_model.config or {})
    assert shape is not None
    wise = shape_of_config(with_them.policies["wiser"].language_model.config or {})
    assert wise is not None
    found = rank_memory(shape, setup_of(with_them, "solver", shape, device="cuda"))
    sampled = spec_of(tokenizer, divergence="sampled")
    less = rank_memory(shape, setup_of(sampled, "solver", shape, device="cuda"))
    assert less.reference == 0
    each = 2 if with_them.policies["wise"].language_model.dtype in ("auto", "bfloat16") else 4
    assert found.reference == each * (shape.parameters + wise.parameters)


def test_a_teacher_needs_no_agent(tokenizer: Path) -> None:
    values = spec_of(tokenizer).model_dump()
    for name in ("wise", "wiser"):
        del values["agents"][name]
    spec = JobSpec.model_validate(values)
    assert spec.teachers_of("solver") == ("wise", "wiser")
    assert spec.teachers_of("wise") == ()
    # A worker binds it, too, to publish its weights.
    assert Learner(load_model("wise", spec.policies["wise"], 0), spec, "wise").published()
