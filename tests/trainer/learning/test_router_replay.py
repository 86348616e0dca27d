"""Router replay: rows bring the experts that an engine used; the trainer computes with these."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.learning.samples import Row
from tests.support.training import make_rollout, make_spec, tiny_config
from tests.trainer.batches import Shape, random_rows
from tests.trainer.learning.test_expert_load import MIXTURE, mixture_spec, model_of
from troupe.job.sections.algorithm import ROUTES_COLUMN
from troupe.mixtures import RecordedRoutes, Routers, RoutingShape
from troupe.rpc import FailedPrecondition
from troupe.tensors import to_proto
from troupe.v1 import experience_store_pb2 as store_pb

SHAPE = Shape(groups=4, members=4, prompt=12, response=16)


def routed(row: Row) -> Row:
    """Return experts that depend on the tokens so far, as in an engine."""
    ids = row.ids[:-1]
    first = np.cumsum(ids) % 8
    both = np.stack([first, (first + 1 + ids % 7) % 8], -1)
    return replace(row, routes=np.stack([both, (both + 1) % 8], 1).astype(np.uint8))


@torch.no_grad()
def replayed_logprobs(model: Any, row: Row) -> torch.Tensor:
    """Return log-probs of a response, by one plain pass with the row's experts."""
    routers = Routers.of(model)
    assert routers is not None
    routes = None if row.routes is None else torch.from_numpy(row.routes.astype(np.int64))
    with routers.passing(None, routes):
        logits = model(torch.from_numpy(row.ids[None, :-1]), use_cache=False).logits[0]
    scored = torch.log_softmax(logits[row.prompt_length - 1 :] / row.temperature, -1)
    return scored.gather(1, torch.from_numpy(row.ids[row.prompt_length :, None]))[:, 0]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"forward_tokens": 24},
        {"share_prefixes": False},
        {"trainer": {"activation_checkpointing": True}},
    ],
    ids=["packed", "many passes", "without trees", "checkpointed"],
)
def test_log_probs_and_gradients_use_the_experts_recorded_in_the_rows(
    tokenizer: Path, how: dict[str, Any]
) -> None:
    """A group of rows without experts is routed by the model."""
    options = dict(how)
    spec = mixture_spec(tokenizer, options.pop("trainer", None), algorithm={"router_replay": True})
    model = model_of(spec)
    rows = random_rows(model, 3, SHAPE)
    rows = [row if row.group.startswith("q1\t") else routed(row) for row in rows]
    assert any(row.routes is None for row in rows)
    expected = torch.cat([replayed_logprobs(model, row) for row in rows])
    own = torch.cat([replayed_logprobs(model, replace(row, routes=None)) for row in rows])
    assert (expected - own).abs().max() > 0.1
    learner = Learner(model, spec, "solver", **options)
    torch.testing.assert_close(learner._passes.logprobs(rows, None), expected, rtol=0, atol=2e-6)

    # The gradient by finite differences of the loss that replayed log-probs give, in one direction.
    learner.accumulate(rows)
    named = dict(learner.model.named_parameters())
    chosen = named["model.layers.0.mlp.gate.weight"]
    assert chosen.grad is not None
    direction = torch.randn(chosen.shape, generator=torch.Generator().manual_seed(0)).double()
    slope = float((chosen.grad * direction).sum())
    learner.discard()
    sums = []
    for step in (1e-4, -1e-4):
        with torch.no_grad():
            chosen.add_(direction, alpha=step)
        learner.accumulate(rows)
        sums.append(float(learner._step.sums.tokens.loss))
        learner.discard()
        with torch.no_grad():
            chosen.add_(direction, alpha=-step)
    assert (sums[0] - sums[1]) / 2e-4 == pytest.approx(slope, rel=2e-3, abs=1e-4)


def claimed(routes: np.ndarray[Any, Any] | None, length: int = 4) -> store_pb.ClaimedSample:
    sample = make_rollout("q", "t", response=[8] * length, reward=1.0)
    if routes is not None:
        sample.columns[ROUTES_COLUMN].tensor.CopyFrom(to_proto(routes))
    return store_pb.ClaimedSample(sample=sample)


@pytest.mark.parametrize(
    ("routes", "why"),
    [
        (np.zeros((7, 2, 2), np.uint8), r"shape \[7, 2, 2\], not \[6, 2, 2\]"),
        (np.zeros((6, 3, 2), np.uint8), "shape"),
        (np.zeros((6, 4), np.uint8), "shape"),
        (np.full((6, 2, 2), 8, np.uint8), "expert 8 of 8"),
    ],
)
def test_experts_that_the_model_does_not_have_are_refused(
    tokenizer: Path, routes: np.ndarray[Any, Any], why: str
) -> None:
    spec = mixture_spec(tokenizer, algorithm={"router_replay": True})
    learner = Learner(model_of(spec, torch.float32), spec, "solver")
    with pytest.raises(FailedPrecondition, match=why) as refused:
        learner.read([claimed(routes)], lambda _: np.empty(0))
    assert refused.value.kind == "malformed_sample"
    (row,) = learner.read([claimed(None)], lambda _: np.empty(0))
    assert row.routes is None


def test_routes_are_read_only_by_mixtures_that_replay_them(tokenizer: Path) -> None:
    """Not without the job's setting, and not by dense models."""
    routes = np.zeros((6, 2, 2), np.uint8)
    spec = mixture_spec(tokenizer)
    learner = Learner(model_of(spec, torch.float32), spec, "solver")
    assert learner.read([claimed(routes)], lambda _: np.empty(0))[0].routes is None
    dense = make_spec(tokenizer, algorithm={"router_replay": True})
    learner = Learner(load_model("solver", dense.policies["solver"], 0), dense, "solver")
    assert learner.read([claimed(routes)], lambda _: np.empty(0))[0].routes is None


@pytest.mark.parametrize(("experts", "kind"), [(256, np.uint8), (512, np.int16)])
def test_experts_are_stored_in_the_smallest_type(experts: int, kind: type) -> None:
    shape = RoutingShape(layers=2, top_k=2, experts=experts)
    indices = np.array([[[0, 1], [experts - 1, 2]]])
    stored = shape.compact(indices)
    assert stored.dtype == kind
    assert (stored == indices).all()
    assert shape.problem(stored, 2) == ""
    assert to_proto(stored).dtype


def test_a_recorded_pass_has_zeros_in_dense_layers() -> None:
    recorded = RecordedRoutes(RoutingShape(3, 2, 4), {1: torch.tensor([[2, 3], [1, 0]])})
    assert recorded.compact().tolist() == [[[0, 0], [2, 3], [0, 0]], [[0, 0], [1, 0], [0, 0]]]


def test_the_routing_shape_follows_from_the_configuration(tokenizer: Path) -> None:
    spec = mixture_spec(tokenizer)
    routers = Routers.of(model_of(spec))
    assert routers is not None
    assert routers.shape == RoutingShape(2, 2, MIXTURE["num_experts"])
    assert tiny_config()["num_hidden_layers"] == 2
