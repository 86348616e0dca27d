"""Strong consistency: the accumulated gradient equals the full batch's, in any division.

Random seeds, shapes, partitions, arrival orders, retries and two policies whose micro-batches
take turns, through the real `Learner`, against autograd on the mean loss of the whole batch.
"""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.learning.ranks import Stopped
from services.trainer.learning.samples import Row
from tests.support.training import VOCABULARY, make_spec
from tests.trainer.batches import Shape, full_batch_gradient, random_rows, relative_error
from troupe.algorithms.traits import ADVANTAGE_TRAITS
from troupe.job import JobSpec

POLICIES = ("solver", "checker")
# Those whose advantage is a number per sample, of rewards that groups compare.
_ADVANTAGES = [name for name, traits in ADVANTAGE_TRAITS.items() if not traits.along_episodes]
# Layer norms in the parameters' own type, so that float64 is never rounded.
GPT = {
    "config": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_positions": 64,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
    }
}


def _allowed(algorithm: dict[str, Any]) -> dict[str, Any]:
    """Return the nearest value that a specification allows."""
    behaviour = algorithm["old_logprobs"] == "behaviour"
    if algorithm["loss"] != "ppo_clip" and algorithm["correction"] == "truncated" and behaviour:
        algorithm["correction"] = "none"
    if algorithm["advantage"] != "reinforce_plus_plus":
        algorithm["normalize_per_agent"] = True
    if algorithm["normalize"] == "constant":
        algorithm["constant_tokens"] = 7
    return algorithm


algorithms = st.fixed_dictionaries(
    {
        "advantage": st.sampled_from(_ADVANTAGES),
        "normalize_per_agent": st.booleans(),
        "loss": st.sampled_from(["ppo_clip", "gspo", "cispo", "dppo_mask"]),
        "normalize": st.sampled_from(["token", "sequence", "constant"]),
        "kl_coefficient": st.sampled_from([0.0, 0.1]),
        "entropy_coefficient": st.sampled_from([0.0, 0.01]),
        "correction": st.sampled_from(["none", "truncated", "masked", "sequence_masked"]),
        "old_logprobs": st.sampled_from(["behaviour", "recomputed"]),
        "scale_by_std": st.booleans(),
        # Narrow ranges, so that clips, caps and masks affect only some tokens.
        "clip_low": st.sampled_from([0.01, 0.2]),
        "clip_high": st.sampled_from([0.01, 0.3]),
    }
).map(_allowed)
layouts = st.fixed_dictionaries(
    {
        "share_prefixes": st.booleans(),
        "skip_zero_advantages": st.booleans(),
        "forward_tokens": st.sampled_from([8, 64, 1024]),
    }
)
shapes = st.builds(
    Shape,
    groups=st.integers(1, 4),
    members=st.integers(1, 6),
    prompt=st.integers(1, 12),
    response=st.integers(1, 10),
)


class Policy:
    """One policy's rows, its learner, and the expected full-batch gradient."""

    def __init__(self, name: str, spec: JobSpec, seed: int, shape: Shape, **options: Any) -> None:
        dtype = options.pop("dtype")
        model = load_model(name, spec.policies[name], seed).to(dtype)
        exact = copy.deepcopy(model).double()
        first = load_model(name, spec.policies[name], seed + 1).double()
        self.rows = random_rows(exact, seed, shape)
        self.exact = full_batch_gradient(exact, self.rows, spec, first)
        # One learner gets its rows in pieces, the other all at once.
        self.learner, self.whole = (
            Learner(copy.deepcopy(model), spec, name, **options) for _ in range(2)
        )
        if self.learner.needs_reference:
            weights = {n: p.to(dtype) for n, p in first.named_parameters()}
            self.learner.set_reference(weights)
            self.whole.set_reference(weights)

    def found(self) -> dict[str, torch.Tensor]:
        """Return the accumulated mean gradient, as the optimizer gets it."""
        return self._given(self.learner)

    def at_once(self) -> dict[str, torch.Tensor]:
        """Return the gradient of the full batch in one micro-batch, in the same precision."""
        self.whole.accumulate(self.rows)
        return self._given(self.whole)

    def _given(self, learner: Learner) -> dict[str, torch.Tensor]:
        seen: dict[str, torch.Tensor] = {}
        named = dict(learner.model.named_parameters())

        def look(*_: Any) -> None:
            seen.update({name: p.grad.clone() for name, p in named.items()})

        hook = learner._optimizer.register_step_pre_hook(look)
        applied = learner.apply(0)  # clipping is out of reach
        hook.remove()
        assert applied.applied, applied.reason
        assert applied.metrics["samples"] == len(self.rows)
        return seen


def _micro_batches(rows: list[Row], dice: random.Random) -> list[list[Row]]:
    """Return a random partition of `rows` in random order."""
    order = dice.sample(rows, len(rows))
    found = []
    while order:
        size = dice.randint(1, 5)
        found.append(order[:size])
        order = order[size:]
    return found


def _accumulate(policies: list[Policy], dice: random.Random) -> None:
    """All micro-batches of all policies, which take turns at random.

    An attempt may lose its leases or be stopped within a micro-batch: then what it computed is
    thrown away, and all of it is done again, cut and ordered afresh.
    """
    left = {i: _micro_batches(p.rows, dice) for i, p in enumerate(policies)}
    retries = {i: dice.randint(0, 2) for i in left}
    while left:
        i = dice.choice(sorted(left))
        learner = policies[i].learner
        if retries[i] and dice.random() < 0.3:
            if dice.random() < 0.5:
                stop = threading.Event()
                stop.set()
                try:
                    learner.accumulate(left[i][0], stop)
                except Stopped:
                    event("stopped within a micro-batch")
            learner.discard()
            retries[i] -= 1
            left[i] = _micro_batches(policies[i].rows, dice)
            event("an attempt was thrown away")
            continue
        learner.accumulate(left[i].pop())
        if not left[i]:
            del left[i]


def _check(
    tokenizer: Path,
    seed: int,
    shape: Shape,
    algorithm: dict[str, Any],
    layout: dict[str, Any],
    dtype: torch.dtype,
    bound: float,
    rounding: float = 0.0,
    **sections: Any,
) -> None:
    """The accumulated gradient equals the full batch's up to `bound`, and the textbook's in float64
    up to `bound` and the model's own `rounding`."""
    pipeline = {"mode": "sync", "steps": 10, "queries_per_step": 4}
    spec = make_spec(
        tokenizer,
        policies=POLICIES,
        algorithm=algorithm,
        optimizer={"max_grad_norm": 1e9},
        pipeline=pipeline | sections.pop("pipeline", {}),
        **sections,
    )
    policies = [
        Policy(name, spec, seed + i, shape, dtype=dtype, **layout)
        for i, name in enumerate(POLICIES)
    ]
    _accumulate(policies, random.Random(seed))
    for policy in policies:
        found = policy.found()
        assert relative_error(found, policy.exact) <= bound + rounding
        assert relative_error(found, policy.at_once()) <= bound


# A failing example is small already; shrinking it would take minutes.
relaxed = settings(
    deadline=None,
    max_examples=12,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("deterministic", [False, True])
@relaxed
@given(st.integers(0, 10_000), shapes, algorithms, layouts)
def test_float64_equals_the_full_batch(
    tokenizer: Path,
    deterministic: bool,
    seed: int,
    shape: Shape,
    algorithm: dict[str, Any],
    layout: dict[str, Any],
) -> None:
    """To 1e-6 as promised, where layer norms round to float32; see the next test."""
    pipeline = {"deterministic": deterministic}
    _check(tokenizer, seed, shape, algorithm, layout, torch.float64, 1e-6, pipeline=pipeline)


@relaxed
@given(st.integers(0, 10_000), shapes, algorithms, layouts)
def test_float64_without_rounding_inside_equals_it_to_the_last_digits(
    tokenizer: Path,
    seed: int,
    shape: Shape,
    algorithm: dict[str, Any],
    layout: dict[str, Any],
) -> None:
    model = {**GPT, "tokenizer": str(tokenizer)}
    _check(tokenizer, seed, shape, algorithm, layout, torch.float64, 1e-11, model=model)


@relaxed
@given(st.integers(0, 10_000), shapes, algorithms, layouts)
@example(  # one token: nothing accumulates, and the model's own rounding is 1e-5
    989,
    Shape(groups=1, members=2, prompt=5, response=1),
    {
        "normalize": "token",
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.01,
        "correction": "none",
        "scale_by_std": False,
    },
    {"share_prefixes": True, "skip_zero_advantages": True, "forward_tokens": 64},
)
def test_float32_equals_the_full_batch_in_float64(
    tokenizer: Path,
    seed: int,
    shape: Shape,
    algorithm: dict[str, Any],
    layout: dict[str, Any],
) -> None:
    _check(tokenizer, seed, shape, algorithm, layout, torch.float32, 1e-5, rounding=4e-5)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "dppo_mask"])
@pytest.mark.parametrize("advantage", _ADVANTAGES)
@settings(relaxed, max_examples=1)
@given(st.integers(0, 10_000))
def test_every_advantage_with_every_loss_gives_the_textbook_gradient(
    tokenizer: Path, advantage: str, loss: str, seed: int
) -> None:
    """Each pair at least once, regardless of the draws above."""
    model = {**GPT, "tokenizer": str(tokenizer)}
    algorithm = {"advantage": advantage, "loss": loss, "clip_low": 0.01, "clip_high": 0.01}
    layout = {"share_prefixes": True, "skip_zero_advantages": True, "forward_tokens": 64}
    _check(tokenizer, seed, Shape(), algorithm, layout, torch.float64, 1e-11, model=model)


LOSSES = ["ppo_clip", "gspo", "cispo", "dppo_mask"]


@pytest.mark.slow
@pytest.mark.parametrize("advantage", _ADVANTAGES)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_combination_that_a_job_may_declare_gives_the_textbook_gradient(
    tokenizer: Path, advantage: str, loss: str
) -> None:
    """Every aggregation, correction and anchor of the ratio with every advantage and loss, or it is
    refused before anything runs."""
    model = {**GPT, "tokenizer": str(tokenizer)}
    layout = {"share_prefixes": True, "skip_zero_advantages": True, "forward_tokens": 64}
    ran = 0
    for normalize, correction, old in _choices():
        algorithm = {
            "advantage": advantage,
            "loss": loss,
            "normalize": normalize,
            "correction": correction,
            "old_logprobs": old,
            "correction_cap": 1.2,
            "clip_low": 0.05,
            "clip_high": 0.1,
            "constant_tokens": 7 * (normalize == "constant"),
        }
        if correction == "truncated" and loss != "ppo_clip" and old == "behaviour":
            with pytest.raises(ValidationError, match="would do it again"):
                make_spec(tokenizer, algorithm=algorithm)
            continue
        _check(tokenizer, 11, Shape(), algorithm, layout, torch.float64, 1e-11, model=model)
        ran += 1
    assert ran == (24 if loss == "ppo_clip" else 21)


def _choices() -> Iterator[tuple[str, str, str]]:
    corrections = ["none", "truncated", "masked", "sequence_masked"]
    yield from itertools.product(
        ["token", "sequence", "constant"], corrections, ["behaviour", "recomputed"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_critic_with_every_combination_gives_the_same_in_micro_batches(
    tokenizer: Path, loss: str
) -> None:
    """Micro-batches give the same result as the whole batch; `async` refuses losses without a
    correction."""
    for normalize, correction, old in _choices():
        algorithm = {
            "advantage": "gae",
            "loss": loss,
            "normalize": normalize,
            "correction": correction,
            "old_logprobs": old,
            "correction_cap": 1.2,
            "critic": {"gamma": 0.95, "optimizer": {"max_grad_norm": 1e9}},
        }
        asynchronous = {"mode": "async", "steps": 10, "queries_per_step": 4}
        if correction == "truncated" and loss != "ppo_clip" and old == "behaviour":
            with pytest.raises(ValidationError, match="would do it again"):
                make_spec(tokenizer, algorithm=algorithm)
            continue
        if correction == "none":
            with pytest.raises(ValidationError, match="needs a correction"):
                make_spec(tokenizer, algorithm=algorithm, pipeline=asynchronous)
        else:
            make_spec(tokenizer, algorithm=algorithm, pipeline=asynchronous)
        spec = make_spec(
            tokenizer,
            model={**GPT, "tokenizer": str(tokenizer)},
            algorithm=algorithm,
            optimizer={"max_grad_norm": 1e9},
            pipeline={"mode": "sync", "steps": 10, "queries_per_step": 4},
        )
        model = load_model("solver", spec.policies["solver"], 3).double()
        rows = random_rows(copy.deepcopy(model), 5, Shape())
        some, whole = (Learner(copy.deepcopy(model), spec, "solver") for _ in range(2))
        for part in _micro_batches(rows, random.Random(1)):
            some.accumulate(part)
        whole.accumulate(rows)
        told = [learner.apply(0) for learner in (some, whole)]
        assert all(applied.applied for applied in told), told[0].reason
        found, wanted = (learner.weights() for learner in (some, whole))
        assert relative_error(found, wanted) < 1e-6
        for name in ("k3_kl", "effective_sample_size", "loss/value", "masked_fraction"):
            assert told[0].metrics[name] == pytest.approx(told[1].metrics[name], rel=1e-6, abs=1e-9)
