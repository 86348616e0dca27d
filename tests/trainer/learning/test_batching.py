"""Forward passes: every response token once, in any layout."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.learning.forward import (
    Capabilities,
    Forward,
    capabilities_of,
    costs_of,
    response_logits,
)
from services.trainer.learning.samples import Row
from services.trainer.learning.sequences.packing import PackedBatch, PassCosts, plan
from tests.support.training import VOCABULARY, score, tiny_config

FREE = PassCosts(token=1.0, pair=0.0)
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 3,
    "layer_types": ["full_attention", "sliding_attention"],
}
DEAR = PassCosts(token=1.0, pair=100.0)


def row(name: str, prompt: list[int], response: list[int]) -> Row:
    ids = np.array([*prompt, *response], np.int64)
    return Row(name, ids, len(prompt), np.zeros(len(response), np.float32), 0.0, (0.0,), 0)


tokens = st.integers(0, 3)
rows_of_few_tokens = st.lists(
    st.tuples(st.lists(tokens, min_size=1, max_size=8), st.lists(tokens, max_size=6)), max_size=10
).map(lambda pairs: [row(str(i), p, r) for i, (p, r) in enumerate(pairs)])


def make_model(**changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = tiny_config(**changes)
    torch.manual_seed(0)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


def path_of(piece: PackedBatch, batch: int, position: int) -> list[int]:
    """Return the tokens that a position attends to, in order."""
    if piece.packing is None or piece.position_ids is None:
        return piece.input_ids[batch, : position + 1].tolist()
    place = piece.packing.place
    slot = position if place is None else int(place[position])
    for block in piece.packing.blocks:
        n, queries, keys = block.shape
        if slot < n * queries:
            break
        slot -= n * queries
    b, q = divmod(slot, queries)
    assert int(block.queries[slot]) == position
    seen = block.keys.view(n, keys)[b, : q + 1]
    if block.mask is not None:
        seen = block.keys.view(n, keys)[b, block.mask[b, 0, q]]
    assert piece.position_ids[batch, seen].tolist() == list(range(len(seen)))
    return piece.input_ids[batch, seen].tolist()


@settings(deadline=None, max_examples=150)
@given(
    rows_of_few_tokens,
    st.integers(1, 60),
    st.sampled_from([None, FREE, DEAR]),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 20)),
)
def test_every_response_token_is_scored_once_behind_its_own_prefix(
    rows: list[Row], budget: int, sharing: PassCosts | None, packed: bool, limit: int | None
) -> None:
    expected = [
        (row.ids[:k].tolist(), int(row.ids[k]))
        for row in rows
        for k in range(row.prompt_length, len(row.ids))
    ]
    found: dict[int, tuple[list[int], int]] = {}
    for piece in plan(rows, budget, packed=packed, sharing=sharing, limit=limit):
        batch, length = piece.input_ids.shape
        if packed:  # only tokens of rows
            assert piece.packing is not None
            assert (batch, length) == (1, sum(piece.packing.query_lengths))
        assert sum(piece.spans) == len(piece.targets)
        alone = len(piece.spans) == 1
        assert alone or batch * length <= budget
        assert alone or limit is None or len(piece.targets) <= limit
        places = zip(piece.order.tolist(), piece.positions.tolist(), strict=True)
        for (number, position), target in zip(places, piece.targets.tolist(), strict=True):
            assert number not in found
            found[number] = (path_of(piece, position // length, position % length), target)
    assert [found[number] for number in sorted(found)] == expected


def test_a_shared_prompt_is_fed_once() -> None:
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    rows = [row(str(k), prompt, [k, 0]) for k in range(4)]
    (piece,) = plan(rows, 1000, sharing=FREE)
    # The last token of a row is never fed.
    assert piece.input_ids.numel() == len(prompt) + 4
    assert sum(p.input_ids.numel() for p in plan(rows, 1000)) == 4 * (len(prompt) + 1)
    # A later turn repeats the first one.
    turns = [row("a", prompt, [5, 6]), row("b", [*prompt, 5, 6, 7], [8])]
    (piece,) = plan(turns, 1000, sharing=FREE)
    assert piece.input_ids.numel() == len(prompt) + 3
    # Long answers to a short prompt are cheaper apart: a shared prompt needs a mask.
    long = [row(str(k), [1], [k] * 20) for k in range(4)]
    (piece,) = plan(long, 1000, sharing=DEAR)
    assert piece.packing is not None
    assert piece.packing.query_lengths == piece.packing.key_lengths
    # A tree never exceeds a pass.
    assert max(p.input_ids.numel() for p in plan(rows, 10, sharing=FREE)) == 10


@settings(deadline=None, max_examples=25)
@given(
    rows_of_few_tokens.filter(lambda rows: any(r.response_length for r in rows)),
    st.booleans(),
)
def test_all_layouts_give_the_models_logprobs(model: Any, rows: list[Row], slides: bool) -> None:
    if slides:
        model = make_model(**SLIDING)
    expected = np.concatenate(
        [score(model, r.ids.tolist(), r.prompt_length) for r in rows if r.response_length]
    )
    forward = Forward(copy.deepcopy(model))
    assert forward.capabilities == Capabilities(packs=True, linear_head=True)
    heat = torch.ones(len(expected), 1)
    for layout in ({"packed": False}, {"sharing": None}, {"sharing": FREE}):
        found = {"logits": torch.empty(len(expected)), "scores": torch.empty(len(expected))}
        for piece in plan(rows, 40, **layout):
            with torch.no_grad():
                logits = response_logits(forward.model, piece)
            assert logits.shape == (len(piece.targets), VOCABULARY)
            logp = torch.log_softmax(logits, -1).gather(1, piece.targets[:, None])[:, 0]
            found["logits"][piece.order] = logp
            found["scores"][piece.order] = forward.scores(piece, heat[piece.order]).logprobs
        for scores in found.values():
            np.testing.assert_allclose(scores.numpy(), expected, atol=1e-5)


def test_a_trial_decides_whether_a_model_can_pack(model: Any) -> None:
    assert capabilities_of(model) == Capabilities(packs=True, linear_head=True)
    assert model.config._attn_implementation == "sdpa"  # as it was
    costs = costs_of(model)
    assert costs.token > costs.pair > 0
    # A recurrent model would read across rows, and its log-probs would be wrong.
    recurrent = make_model(
        model_type="mamba", state_size=4, conv_kernel=2, expand=2, intermediate_size=64
    )
    assert not capabilities_of(recurrent).packs
    # Attention over blocks of the text, which short rows do not show.
    blocks = make_model(model_type="llama")
    assert capabilities_of(blocks).packs
    blocks.config.layer_types = ["chunked_attention"] * 2
    assert not capabilities_of(blocks).packs
    # Soft-capped logits differ from its output layer's.
    capped = make_model(model_type="gemma2", final_logit_softcapping=3.0)
    assert not capabilities_of(capped).linear_head


def test_a_model_that_cannot_pack_is_scored_row_by_row() -> None:
    capped = make_model(model_type="gemma2", final_logit_softcapping=3.0)
    rows = [row("a", [1, 2, 3], [4, 5]), row("b", [6], [7, 8, 9])]
    expected = np.concatenate([score(capped, r.ids.tolist(), r.prompt_length) for r in rows])
    forward = Forward(capped)
    found = torch.empty(5)
    for piece in plan(rows, 40, packed=forward.capabilities.packs):
        found[piece.order] = forward.scores(piece, torch.ones(len(piece.order), 1)).logprobs
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)
