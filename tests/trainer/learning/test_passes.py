"""Job settings of gradient computation change memory and kernels, not numbers."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from services.trainer.learning.kernels import setup
from services.trainer.learning.kernels.setup import configure_model
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from tests.support.peaks import tensor_peak
from tests.support.training import make_spec, tiny_config
from tests.trainer.batches import Shape, random_rows
from tests.trainer.learning.test_expert_load import MIXTURE
from troupe.job import JobSpecError, TrainerSpec, parse_job
from troupe.rpc import FailedPrecondition
from troupe.scheduling.admission import keeps_tokens
from troupe.scheduling.defaults import defaults_of

SHAPE = Shape(groups=4, members=6, prompt=20, response=40)


def learner_of(
    tokenizer: Path, trainer: dict[str, Any], *, aux: float = 0.0, **model: Any
) -> Learner:
    """Return a learner of a tiny model with seed 0, or another; `aux`: of the routers' loss."""
    source = {"config": tiny_config(**model), "tokenizer": str(tokenizer)}
    algorithm = {"kl_coefficient": 0.05, "router_aux_loss": aux}
    spec = make_spec(tokenizer, model=source, algorithm=algorithm)
    policy = spec.policies["solver"].model_copy(update={"trainer": TrainerSpec(**trainer)})
    spec = spec.model_copy(update={"policies": {"solver": policy}})
    learner = Learner(load_model("solver", policy, 0), spec, "solver", skip_zero_advantages=False)
    learner.set_reference({n: p * 1.01 for n, p in learner.model.named_parameters()})
    return learner


def gradient(learner: Learner, seed: int = 0) -> torch.Tensor:
    """Return the gradient of a random batch, in two micro-batches."""
    plain = load_model("solver", learner._policy, 0)
    rows = random_rows(plain, seed, SHAPE)
    learner.accumulate(rows[:3])
    learner.accumulate(rows[3:])
    grads = [p.grad for p in learner.model.parameters()]
    return torch.cat([g.flatten() for g in grads if g is not None])


def test_activation_checkpointing_gives_the_same_bits_in_less_memory(tokenizer: Path) -> None:
    wide = {"num_hidden_layers": 8, "intermediate_size": 256}
    plain = learner_of(tokenizer, {}, **wide)
    again = learner_of(tokenizer, {"activation_checkpointing": True}, **wide)
    some = learner_of(tokenizer, {"activation_checkpointing": 4}, **wide)
    most = {}
    for name, learner in {"plain": plain, "again": again, "some": some}.items():
        gradient(learner)  # warm-up
        learner.discard()
        most[name] = tensor_peak(lambda learner=learner: gradient(learner))
    expected = gradient(plain, 1)
    assert torch.equal(expected, gradient(again, 1))
    assert torch.equal(expected, gradient(some, 1))
    assert most["again"] < 0.7 * most["plain"]
    assert most["again"] < most["some"] < 0.9 * most["plain"]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_jobs_tokens_of_a_forward_pass_override_the_workers(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    torch.set_num_threads(threads)
    learner = learner_of(tokenizer, {"forward_tokens": 90})
    sizes: list[int] = []
    computing: set[str] = set()
    # Patch the class: a twin would share the attribute of the policy's own model, and with it
    # that model's layers and hooks.
    kind = type(learner.model)
    forward = kind.forward

    def count(model: Any, *args: Any, **kwargs: Any) -> Any:
        if "input_ids" in kwargs:  # otherwise the test's own call, for scores of its rows
            sizes.append(kwargs["input_ids"].numel())
            computing.add(threading.current_thread().name)
        return forward(model, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", count)
    gradient(learner)
    assert len(computing) == threads
    assert len(sizes) > 4
    assert max(sizes) <= 90


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("again", [False, True])
def test_compiled_layers_give_the_same_gradient(tokenizer: Path, again: bool) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    torch._dynamo.reset()
    counters.clear()
    compiled = learner_of(tokenizer, {"compile": "on", "activation_checkpointing": again})
    for seed in range(2):  # pieces of other sizes
        expected = gradient(learner_of(tokenizer, {}), seed)
        compiled.discard()
        torch.testing.assert_close(gradient(compiled, seed), expected, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("aux", [0.0, 0.1])
def test_experts_are_left_out_of_compilation(tokenizer: Path, aux: float) -> None:
    """However many experts a pass uses, and tokens each of them has: the layers around them are
    compiled once, for any number of tokens."""
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    torch._dynamo.reset()
    counters.clear()
    compiled = learner_of(tokenizer, {"compile": "on"}, aux=aux, **MIXTURE)
    graphs = []
    for seed in range(4):
        expected = gradient(learner_of(tokenizer, {"kernels": "off"}, aux=aux, **MIXTURE), seed)
        compiled.discard()
        apart = (gradient(compiled, seed) - expected).norm() / expected.norm()
        assert apart < 1e-5
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs[1] == graphs[3]


def test_a_mixture_whose_experts_cannot_be_left_out_is_not_compiled(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "mixed_blocks", lambda model: [])
    with pytest.raises(FailedPrecondition) as caught:
        learner_of(tokenizer, {"compile": "on"}, **MIXTURE)
    assert caught.value.kind == "model_unsupported"
    assert caught.value.field == "policies.solver.trainer.compile"


def test_a_worker_without_a_compiler_refuses_to_compile(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(FailedPrecondition) as caught:
        learner_of(tokenizer, {"compile": "on"})
    assert caught.value.kind == "no_compiler"
    assert caught.value.field == "policies.solver.trainer.compile"


def test_compiled_kernels_are_not_deterministic(tokenizer: Path) -> None:
    values = make_spec(tokenizer, pipeline={"steps": 1, "queries_per_step": 1}).model_dump()
    values["pipeline"]["deterministic"] = True
    values["policies"]["solver"]["trainer"]["compile"] = "on"
    with pytest.raises(JobSpecError, match=r"policies\.solver\.trainer\.compile"):
        parse_job(json.dumps(values))


def test_a_model_without_known_layers_is_refused() -> None:
    spec = TrainerSpec(activation_checkpointing=True)
    with pytest.raises(FailedPrecondition) as caught:
        configure_model("solver", torch.nn.Linear(2, 2), spec)
    assert caught.value.kind == "model_unsupported"
    assert caught.value.field == "policies.solver.trainer.activation_checkpointing"


@pytest.mark.parametrize(
    ("asked", "memory", "wrapped"),
    [
        ("auto", None, False),
        ("auto", 24 << 30, True),
        ("auto", 0, True),
        (False, 80 << 30, False),
        (True, None, True),
        (1, None, [True, False]),
        (9, 80 << 30, True),
    ],
)
def test_activation_checkpointing_is_on_by_default_on_a_gpu(
    asked: Any, memory: int | None, wrapped: bool | list[bool]
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config()))
    spec = TrainerSpec(activation_checkpointing=asked)
    configure_model("solver", model, spec, defaults_of(memory))
    expected = wrapped if isinstance(wrapped, list) else [wrapped] * 2
    assert [isinstance(layer.forward, partial) for layer in model.model.layers] == expected


def test_a_model_without_known_layers_is_left_alone_by_default() -> None:
    configure_model("solver", torch.nn.Linear(2, 2), TrainerSpec(), defaults_of(80 << 30))


def test_a_pass_on_a_cpu_keeps_its_number_of_tokens(tokenizer: Path) -> None:
    learner = learner_of(tokenizer, {})
    assert learner._passes.budget.tokens == 1024
    assert not any(isinstance(layer.forward, partial) for layer in learner.model.model.layers)


def test_tokens_are_kept_of_few_rows_with_advantages_and_ratios(tokenizer: Path) -> None:
    learner = learner_of(tokenizer, {})
    rows = [
        replace(row, trajectory=f"q{i // 4}-s0-t{i % 4}", turn=i % 3)
        for i, row in enumerate(random_rows(learner.model, 1, SHAPE))
    ]
    every = learner._job.pipeline.queries_per_step
    wanted = {
        (row.trajectory, row.turn): row for row in rows if keeps_tokens(row.trajectory, every)
    }
    assert 0 < len(wanted) < len(rows) or every == 1
    now = torch.split(learner._passes.logprobs(rows, None), [row.response_length for row in rows])
    by_id = {row.sample_id: logprobs for row, logprobs in zip(rows, now, strict=True)}
    advantages = learner._step.advantages.estimate(rows).advantages.tolist()
    expected = {row.sample_id: one for row, one in zip(rows, advantages, strict=True)}
    learner.accumulate(rows)
    kept = learner.apply(0).kept
    assert {(one.trajectory_id, one.turn) for one in kept} == set(wanted)
    for one in kept:
        row = wanted[one.trajectory_id, one.turn]
        assert list(one.advantages) == pytest.approx(
            [expected[row.sample_id]] * row.response_length
        )
        ratios = (by_id[row.sample_id] - torch.from_numpy(row.behaviour)).exp()
        assert list(one.ratios) == pytest.approx(ratios.tolist(), rel=1e-4)
    # The next step begins without gradients.
    assert learner._passes.kept.take() == []
