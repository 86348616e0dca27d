"""Load of experts: the same counts and the same gradient however a step is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.learning.samples import Row
from tests.support.architectures import make
from tests.support.training import VOCABULARY, make_spec, tiny_config
from tests.trainer.batches import Shape, full_batch_gradient, random_rows
from troupe.algorithms.expert_load import imbalances, load_metrics
from troupe.job import JobSpec, TrainerSpec
from troupe.mixtures import RecordedRoutes, Routers

MIXTURE = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
}
SHAPE = Shape(groups=4, members=4, prompt=12, response=16)
COEFFICIENT = 0.7


def mixture_spec(
    tokenizer: Path, trainer: dict[str, Any] | None = None, **sections: Any
) -> JobSpec:
    dtype = sections.pop("dtype", "float32")
    model = {"config": tiny_config() | MIXTURE, "tokenizer": str(tokenizer), "dtype": dtype}
    spec = make_spec(tokenizer, model=model, **sections)
    policy = spec.policies["solver"].model_copy(update={"trainer": TrainerSpec(**trainer or {})})
    return spec.model_copy(update={"policies": {"solver": policy}})


def model_of(spec: JobSpec, kind: torch.dtype = torch.float64) -> Any:
    """Grouped products of experts are for float32 and less."""
    model = load_model("solver", spec.policies["solver"], 0).to(kind)
    if kind == torch.float64:
        model.set_experts_implementation("eager")
    return model


def learner_of(spec: JobSpec, **options: Any) -> Learner:
    kind = options.pop("kind", torch.float64)
    return Learner(model_of(spec, kind), spec, "solver", **options)


def gradient(learner: Learner) -> dict[str, torch.Tensor]:
    named = learner.model.named_parameters()
    return {name: p.grad / learner._step.sums.normalizer for name, p in named if p.grad is not None}


def textbook_imbalance(model: Any, row: Row) -> torch.Tensor:
    """Return a row's imbalance by transformers' routers: E/k sum_e f_e P_e, mean over layers."""
    output = model(torch.from_numpy(row.ids[:-1])[None], output_router_logits=True, use_cache=False)
    found = []
    for logits in output.router_logits:
        scored = logits[row.prompt_length - 1 :].softmax(-1)
        n, experts = scored.shape
        top = scored.topk(2, -1).indices
        share = torch.zeros(experts, dtype=scored.dtype)
        for e in range(experts):
            share[e] = int((top == e).sum()) / n
        found.append(experts / 2 * (share * scored.mean(0)).sum())
    return torch.stack(found).mean()


def textbook(spec: JobSpec, rows: list[Row]) -> tuple[dict[str, torch.Tensor], float]:
    """Return the gradient of the mean loss with the auxiliary loss, and the latter."""
    model = model_of(spec)
    plain = full_batch_gradient(model, rows, spec)
    model.zero_grad()
    scored = [row for row in rows if row.response_length]
    tokens = sum(row.response_length for row in scored)
    auxiliary = sum(textbook_imbalance(model, r) * r.response_length / tokens for r in scored)
    assert isinstance(auxiliary, torch.Tensor)
    (COEFFICIENT * auxiliary).backward()
    both = {
        name: plain[name] + (0 if p.grad is None else p.grad)
        for name, p in model.named_parameters()
    }
    return both, float(auxiliary.detach())


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"forward_tokens": 24},
        {"share_prefixes": False},
        {"trainer": {"activation_checkpointing": True}},
        {"trainer": {"activation_checkpointing": True}, "pipeline": {"deterministic": True}},
    ],
    ids=["packed", "many passes", "without trees", "checkpointed", "deterministic"],
)
def test_the_auxiliary_loss_equals_the_textbooks(tokenizer: Path, how: dict[str, Any]) -> None:
    options = dict(how)
    trainer, pipeline = options.pop("trainer", None), options.pop("pipeline", {})
    sections = {"algorithm": {"router_aux_loss": COEFFICIENT, "entropy_coefficient": 0.01}}
    if pipeline:
        sections["pipeline"] = {"steps": 10, "queries_per_step": 2, **pipeline}
    spec = mixture_spec(tokenizer, trainer, **sections)
    learner = learner_of(spec, **options)
    rows = random_rows(model_of(spec), 3, SHAPE)
    expected, auxiliary = textbook(spec, rows)
    for part in (rows[:3], rows[3:]):
        learner.accumulate(part)
    learner.complete()
    if pipeline:  # exact sums become gradients in `apply` only
        learner._gradients.finish(1, 1e9)
    found = gradient(learner)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-6, atol=2e-7, msg=name)
    metrics = learner.apply(0).metrics
    assert metrics["router/aux_loss"] == pytest.approx(auxiliary, rel=1e-6)
    tokens = sum(row.response_length for row in rows)
    assert tokens > 20
    assert 1.0 <= metrics["router/load_max"] <= 4.0
    assert 0.0 < metrics["router/load_entropy"] <= 1.0


def test_threads_and_one_pass_measure_the_same(tokenizer: Path) -> None:
    spec = mixture_spec(tokenizer, algorithm={"router_aux_loss": COEFFICIENT})
    rows = random_rows(load_model("solver", spec.policies["solver"], 0), 5, SHAPE)
    found = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            learner = learner_of(spec, kind=torch.float32)
            learner.accumulate(rows)
            assert (learner._passes._threads is not None) == (number == 2)
            found.append((gradient(learner), learner._step.sums.tokens.expert_tokens))
    finally:
        torch.set_num_threads(threads)
    (one, counts), (two, others) = found
    assert counts is not None
    assert torch.equal(counts, others)
    tokens = sum(row.response_length for row in rows)
    assert counts.sum(-1).tolist() == [2 * tokens] * 2
    for name, grad in one.items():
        torch.testing.assert_close(two[name], grad, rtol=1e-4, atol=1e-6)


def test_rows_without_advantage_even_out_experts_too(tokenizer: Path) -> None:
    spec = mixture_spec(tokenizer, algorithm={"router_aux_loss": 0.1})
    learner = learner_of(spec)
    rows = random_rows(learner.model, 0, SHAPE)
    flat = [replace(row, reward=1.0, group_rewards=(1.0,) * len(row.group_rewards)) for row in rows]
    learner.accumulate(flat)
    grads = gradient(learner)
    assert grads["model.layers.1.mlp.gate.weight"].abs().max() > 0


def test_a_dense_model_has_no_such_metrics(tokenizer: Path) -> None:
    spec = make_spec(tokenizer, algorithm={"router_aux_loss": 0.1})
    learner = Learner(load_model("solver", spec.policies["solver"], 0), spec, "solver")
    learner.accumulate(random_rows(learner.model, 0, SHAPE))
    assert not [name for name in learner.apply(0).metrics if name.startswith("router/")]


def test_pairs_of_preferences_are_not_evened_out(tokenizer: Path) -> None:
    with pytest.raises(ValueError, match="router_aux_loss"):
        make_spec(
            tokenizer,
            algorithm={"router_aux_loss": 0.1},
            preferences={"tasks": {"source": "nowhere:rows"}, "steps": 1},
        )


@given(seed=st.integers(0, 1 << 30), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_the_imbalance_is_one_for_equal_probabilities_and_never_below_zero(
    seed: int, lengths: list[int]
) -> None:
    rng = np.random.default_rng(seed)
    n, experts, k = sum(lengths), 6, 2
    chosen = torch.from_numpy(rng.permuted(np.tile(np.arange(experts), (n, 1)), axis=1)[:, :k])
    sizes = torch.tensor(lengths)
    even = imbalances(torch.zeros(n, experts), chosen, sizes)
    torch.testing.assert_close(even, torch.ones(len(lengths)))
    logits = torch.from_numpy(rng.normal(size=(n, experts)))
    top = logits.topk(k, -1).indices
    found = imbalances(logits, top, sizes)
    assert (found > 0).all()
    assert (found <= experts / k + 1e-9).all()
    # A row alone has the same load as among others.
    parts = zip(logits.split(lengths), top.split(lengths), lengths, strict=True)
    alone = torch.cat([imbalances(a, b, torch.tensor([size])) for a, b, size in parts])
    torch.testing.assert_close(alone, found)


def test_load_metrics_by_hand() -> None:
    counts = torch.tensor([[2.0, 2, 2, 2], [8, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    found = load_metrics(counts)
    assert found["router/load_max"] == 4.0
    assert found["router/load_entropy"] == pytest.approx(0.5)
    assert found["router/idle_fraction"] == 3 / 8
    assert load_metrics(counts[2:]) == {}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "llama4", "lfm2_moe"])
def test_replayed_experts_compute_the_tokens(name: str) -> None:
    model = make(name)
    routers = Routers.of(model)
    assert routers is not None
    assert Routers.of(model) is routers
    ids = torch.randint(VOCABULARY, (1, 20))
    recorded = RecordedRoutes(routers.shape, {})
    with torch.no_grad():
        plain = model(ids).logits
        with routers.passing(recorded):
            assert torch.equal(model(ids).logits, plain)
        routes = torch.from_numpy(recorded.compact().astype(np.int64))
        with routers.passing(None, routes):
            assert torch.equal(model(ids).logits, plain)
        # Others from the tenth token on: causal, so that only later logits differ.
        other = torch.cat([torch.full_like(routes[:10], -1), (routes[10:] + 1) % 4])
        again = RecordedRoutes(routers.shape, {})
        with routers.passing(again, other):
            moved = model(ids).logits
        torch.testing.assert_close(moved[:, :10], plain[:, :10])
        assert (moved[:, 10:] - plain[:, 10:]).abs().amax(-1).min() > 1e-3
        for layer in routers.mixed:
            assert torch.equal(again.by_layer[layer][10:], other[10:, layer])
        assert torch.equal(model(ids).logits, plain)


def test_a_router_that_does_not_select_by_top_k_is_not_replayed() -> None:
    assert Routers.of(make("phimoe")) is None
    assert Routers.of(make("qwen3")) is None
