"""Sequences that are cut into pieces: the uncut gradient, no shared token twice, bounded memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer.learning.forward import Capabilities, Forward
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.learning.samples import Row
from services.trainer.learning.sequences import attention
from services.trainer.learning.sequences.packing import PackedBatch, Slices, plan
from tests.support.peaks import tensor_peak
from tests.support.training import VOCABULARY, make_spec, tiny_config
from tests.trainer.batches import Shape, random_rows, relative_error, response_logprobs
from tests.trainer.learning.test_batching import FREE, SLIDING, make_model, row, rows_of_few_tokens
from troupe.algorithms.statistics import TokenStatistics
from troupe.job import TrainerSpec


def conversation(turns: int, size: int, seed: int = 0, start: list[int] | None = None) -> list[Row]:
    """Return a row per turn of `size` tokens, half of them the reply, after the earlier turns."""
    rng = np.random.default_rng(seed)
    ids = list(start or [])
    found = []
    for k in range(turns):
        ids += rng.integers(VOCABULARY, size=size - size // 2).tolist()
        reply = rng.integers(VOCABULARY, size=size // 2).tolist()
        found.append(row(f"{seed}-{k}", ids, reply))
        ids += reply
    return found


@pytest.fixture(scope="module")
def full() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def sliding() -> Any:
    return make_model(**SLIDING)


def slopes(model: Any, rows: list[Row], **layout: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradient of a weighted sum over all response tokens."""
    forward = Forward(copy.deepcopy(model), Capabilities(packs=True, linear_head=True))
    weights = torch.sin(torch.arange(sum(one.response_length for one in rows), dtype=torch.float32))
    total = 0.0
    for batch in plan(rows, **layout):
        if batch.keeps:
            forward.keep(batch)
            continue
        own = weights[batch.order]

        def loss_of(
            logp: torch.Tensor, entropy: torch.Tensor, part: slice, own: torch.Tensor = own
        ) -> torch.Tensor:
            return ((logp + 0.1 * entropy) * own[part]).sum()

        heat = torch.ones(len(own), 1)
        loss, _ = forward.loss(batch, heat, loss_of)
        torch.autograd.backward(loss)
        total += float(loss.detach())
        batch.forget()
        if batch.history is not None and batch.done:
            assert all(piece not in batch.history._pieces for piece in batch.done)
    return total, {n: p.grad for n, p in forward.model.named_parameters() if p.grad is not None}


def assert_same(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-4)
    assert found[1].keys() == expected[1].keys()
    for name, slope in expected[1].items():
        torch.testing.assert_close(found[1][name], slope, rtol=1e-4, atol=tolerance, msg=name)


@settings(deadline=None, max_examples=12)
@given(
    rows_of_few_tokens.filter(lambda rows: any(r.response_length for r in rows)),
    st.integers(1, 12),
    st.booleans(),
)
def test_pieces_give_the_gradient_of_the_whole(
    full: Any, sliding: Any, rows: list[Row], cut: int, slides: bool
) -> None:
    model = sliding if slides else full
    expected = slopes(model, rows, budget=1000, packed=False)
    assert_same(slopes(model, rows, budget=1000, sharing=FREE), expected)
    assert_same(slopes(model, rows, budget=cut, cut=cut, sharing=FREE), expected)


def first_of(batches: list[PackedBatch], batch: PackedBatch) -> int:
    """Return the first pass of a sequence, which identifies it."""
    return next(i for i, one in enumerate(batches) if one.history is batch.history)


def layout_of(batches: list[list[PackedBatch]]) -> dict[tuple[int, int], list[list[int]]]:
    """Return, by sequence and piece, the tokens of its keys, of each rank, padded to one length.
    `batches`: by rank."""
    found: dict[tuple[int, int], list[list[int]]] = {}
    for rank, mine in enumerate(batches):
        for number, batch in enumerate(mine):
            packing = batch.packing
            assert packing is not None
            if packing.past is None:
                continue
            place = first_of(mine, batch), packing.past.piece
            others = [other[number].packing for other in batches]
            assert all(o and o.past and o.past.piece == place[1] for o in others)
            own = batch.input_ids[0].tolist()
            own += [-1] * (packing.slice_tokens - len(own))
            found.setdefault(place, [[] for _ in batches])[rank] = own
    return found


@settings(deadline=None, max_examples=100)
@given(
    rows_of_few_tokens,
    st.integers(1, 12),
    st.integers(1, 30),
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from(["scores", "gradients", "coupled"]),
    st.integers(1, 3),
)
def test_pieces_score_every_token_once_behind_its_own_prefix(
    rows: list[Row], cut: int, budget: int, limit: int | None, kind: str, ranks: int
) -> None:
    scored = [(row.ids, k) for row in rows for k in range(row.prompt_length, len(row.ids))]
    prefixes = [ids[:k].tolist() for ids, k in scored]
    targets = [int(ids[k]) for ids, k in scored]
    slices = [None] if ranks == 1 else [Slices(k, ranks, unused) for k in range(ranks)]
    batches = [
        plan(
            rows,
            budget,
            sharing=FREE,
            limit=limit,
            cut=cut,
            gradients=kind != "scores",
            coupled=kind == "coupled",
            slices=one,
        )
        for one in slices
    ]
    assert len({len(mine) for mine in batches}) == 1
    layouts = layout_of(batches)
    found: dict[int, list[int]] = {}
    for mine in batches:
        kept: set[tuple[int, int]] = set()
        learnt: set[tuple[int, int]] = set()
        for batch in mine:
            packing = batch.packing
            assert packing is not None
            keys = batch.input_ids[0].tolist()
            if packing.past is not None:
                assert batch.input_ids.numel() <= max(cut, 2 * ranks)
                first = first_of(mine, batch)
                piece = (first, packing.past.piece)
                keys = [token for part in layouts[piece] for token in part]
                for earlier, index in packing.past.earlier:
                    assert (first, earlier) in kept
                    # The pieces that it reads are differentiated after it.
                    assert kind == "scores" or (first, earlier) not in learnt
                    whole = [token for part in layouts[first, earlier] for token in part]
                    keys += whole if index is None else [whole[i] for i in index.tolist()]
                if packing.past.keeps:
                    kept.add(piece)
                if not batch.keeps:
                    learnt.add(piece)
                kept -= {(first, done) for done in batch.done}
            if batch.keeps:
                continue
            paths: dict[int, list[int]] = {}
            at = 0
            queries = 0
            for q, k in zip(packing.query_lengths, packing.key_lengths, strict=True):
                path = [keys[i] for i in packing.paths[at : at + k].tolist()]
                for j in range(q):
                    paths[queries + j] = path[: k - q + j + 1]
                at, queries = at + k, queries + q
            assert -1 not in {token for path in paths.values() for token in path}
            places = zip(batch.order.tolist(), batch.positions.tolist(), strict=True)
            for (token, place), target in zip(places, batch.targets.tolist(), strict=True):
                assert token not in found
                assert target == targets[token]
                found[token] = paths[place]
        assert not kept, "all is forgotten in the end"
    assert [found[token] for token in range(len(prefixes))] == prefixes


def unused(key: Any, value: Any, width: int) -> Any:
    raise AssertionError("nothing is computed")


def test_a_conversation_is_one_sequence_of_its_tokens() -> None:
    rows = conversation(10, 40)
    (batch,) = plan(rows, 1000, sharing=FREE)
    assert batch.packing is not None
    assert batch.input_ids.numel() == len(rows[-1].ids) - 1
    # Causal attention over the whole conversation: no mask, no separate row for each turn.
    assert batch.packing.query_lengths == (399,)
    assert not batch.packing.blocks[0].masked
    pieces = plan(rows, 100, sharing=FREE, cut=100)
    assert [one.input_ids.numel() for one in pieces] == [99, 100, 100, 100, 100, 100, 99]
    assert [one.keeps for one in pieces] == [True, True, True, False, False, False, False]
    # Answers to one short prompt are not worth a second pass over the first of them.
    answers = [row(str(k), [1, 2, 3], [k % 7] * 30) for k in range(7)]
    assert not any(one.keeps for one in plan(answers, 70, sharing=FREE, cut=70))


def test_masks_are_made_for_kernels_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(str(k), list(range(40)), [k] * 100) for k in range(3)]
    (batch,) = plan(rows, 1000, sharing=FREE)
    assert batch.packing is not None
    q, k, v = (torch.randn(1, 2, batch.input_ids.numel(), 8) for _ in range(3))

    def attend() -> torch.Tensor:
        found: torch.Tensor = attention.packed_attention(
            torch.nn.Module(), q, k, v, None, packing=batch.packing
        )[0]
        return found

    lengths: list[Any] = []

    def by_lengths(packing: Any, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        lengths.append(packing.key_lengths)
        return query.transpose(1, 2)

    monkeypatch.setattr(attention, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(attention, "_any_lengths", by_lengths)
    attend()
    assert lengths
    assert not any(block.made for block in batch.packing.blocks)
    monkeypatch.undo()
    attend()
    assert any(block.made for block in batch.packing.blocks)


ALGORITHMS: list[dict[str, Any]] = [
    {"kl_coefficient": 0.05, "entropy_coefficient": 0.01},
    {"loss": "gspo", "normalize": "sequence", "kl_coefficient": 0.05},
    {"correction": "sequence_masked", "correction_cap": 1.5, "old_logprobs": "recomputed"},
    {"advantage": "gae", "critic": {}},
]


def learners(
    tokenizer: Path, algorithm: dict[str, Any], *budgets: int, dtype: str = "float32"
) -> Iterator[Learner]:
    for tokens in budgets:
        config = tiny_config(num_hidden_layers=3, intermediate_size=512)
        spec = make_spec(
            tokenizer,
            model={"config": config, "tokenizer": str(tokenizer), "dtype": dtype},
            algorithm=algorithm,
        )
        trainer = TrainerSpec(forward_tokens=tokens)
        policy = spec.policies["solver"].model_copy(update={"trainer": trainer})
        spec = spec.model_copy(update={"policies": {"solver": policy}})
        model = load_model("solver", policy, 0)
        learner = Learner(model, spec, "solver", skip_zero_advantages=False)
        if algorithm.get("kl_coefficient"):
            learner.set_reference({n: p * 1.01 for n, p in model.named_parameters()})
        yield learner


def played(learner: Learner) -> list[Row]:
    """Return turns of conversations, and answers to one prompt, near the model."""
    rows = random_rows(learner.model, 1, Shape(groups=2, members=3, prompt=20, response=30))
    start = [1, 2, 3, 4, 5]
    for seed in range(3):
        for turn, one in enumerate(conversation(4, 24, seed, start)):
            exact = response_logprobs(learner.model, one)[0].detach().float().numpy()
            noise = 0.3 * np.random.default_rng(seed).standard_normal(len(exact))
            rows.append(
                replace(
                    one,
                    behaviour=(exact + noise).astype(np.float32),
                    reward=float(seed + turn),
                    group_rewards=tuple(sorted(float(s + turn) for s in range(3))),
                    group=f"g{turn}",
                    trajectory=f"q0-s0-t{9 + seed}",
                    agent="agent0",
                    turn=turn,
                )
            )
    return rows


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["kl", "gspo", "masked", "critic"])
def test_a_step_in_pieces_equals_the_whole_step(tokenizer: Path, algorithm: dict[str, Any]) -> None:
    whole, cut = learners(tokenizer, algorithm, 4096, 20)
    rows = played(whole)
    for learner in (whole, cut):
        learner.accumulate(rows)
        learner.complete()
    expected, found = (
        {n: p.grad for n, p in one.model.named_parameters() if p.grad is not None}
        for one in (whole, cut)
    )
    assert relative_error(found, expected) < 1e-5
    ours, theirs = cut.apply(0), whole.apply(0)
    assert ours.metrics.pop("train/seconds") > 0
    for name, value in ours.metrics.items():
        assert value == pytest.approx(theirs.metrics[name], rel=1e-4, abs=1e-6), name
    assert "train/packed" not in ours.metrics
    # Shown tokens of cut rows are complete.
    kept = {(one.trajectory_id, one.turn): list(one.ratios) for one in theirs.kept}
    assert kept
    for one in ours.kept:
        assert list(one.ratios) == pytest.approx(kept[one.trajectory_id, one.turn], rel=1e-3)


def test_pieces_in_half_precision_round_as_the_whole_does(tokenizer: Path) -> None:
    algorithm = {"kl_coefficient": 0.05}
    (exact,) = learners(tokenizer, algorithm, 4096)
    rows = played(exact)
    grads = []
    for learner in (exact, *learners(tokenizer, algorithm, 4096, 20, dtype="bfloat16")):
        learner.accumulate(rows)
        grads.append({n: p.grad.float() for n, p in learner.model.named_parameters()})
        if learner is not exact:
            assert learner._passes._forward.capabilities.packs
    whole, cut = (relative_error(one, grads[0]) for one in grads[1:])
    assert 0 < cut < max(1.5 * whole, 0.03)


def test_a_long_conversation_is_trained_in_the_memory_of_a_pass(tokenizer: Path) -> None:
    whole, cut = learners(tokenizer, {}, 4096, 128)
    rows = conversation(8, 128)
    rows = [replace(one, reward=k, group_rewards=(0.0, 7.0)) for k, one in enumerate(rows)]
    held = []
    for learner in (whole, cut):
        learner.accumulate(rows)  # warm-up
        learner.discard()
        held.append(tensor_peak(lambda learner=learner: learner.accumulate(rows)))
    assert held[1] < 0.4 * held[0]


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts reads of values from tensors, for which the host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("_local_scalar_dense", "nonzero", "equal")
        self.count += any(str(func).startswith(f"aten.{name}.") for name in names)
        return func(*args, **(kwargs or {}))


def test_a_micro_batch_waits_for_the_device_once(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (learner,) = learners(tokenizer, {"kl_coefficient": 0.05}, 20)
    rows = played(learner)
    advantages = torch.ones(len(rows), dtype=torch.float64)
    learner._passes.backward(rows, advantages, TokenStatistics(), None)
    columns = learner._passes._columns(rows, advantages)  # made on the host
    monkeypatch.setattr(learner._passes, "_columns", lambda *_: columns)
    # A read of temperatures that happens only on a CPU.
    monkeypatch.setattr(torch.Tensor, "all", lambda *_: False)
    with _Waits() as waits:
        assert not learner._passes.backward(rows, advantages, TokenStatistics(), None)
    assert waits.count == 1
