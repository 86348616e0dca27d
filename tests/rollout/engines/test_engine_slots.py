"""Slots of the embedded engine: what they hold, and when there is no room for them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.engines.embedded import attention as slot_attention
from services.rollout.engines.embedded import batcher as slot_batcher
from services.rollout.engines.embedded import cache as slot_cache
from services.rollout.engines.embedded.batcher import SlotBatcher
from services.rollout.engines.embedded.cache import LEAST_TURNS, SlotAllocator, SlotRun
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.turns import EngineTurn
from tests.rollout.engines.asking import ask, prompt
from tests.rollout.engines.models import (
    make_model,
    policy_spec,
    publish,
    reference_logprobs,
    transfer_in,
)
from tests.support.training import rounding
from troupe.job import PolicySpec
from troupe.mixtures import RoutingShape
from troupe.workflow.backend import Sampling
from troupe.workflow.token_ids import TokenIds

COUNT = 6


class Tokens:
    """Stands for a cache: which token each key in it is of."""

    count = COUNT
    limited = False

    def __init__(self) -> None:
        self.held: list[list[int]] = [[] for _ in range(COUNT)]

    def move(self, moves: Mapping[int, tuple[int, int]]) -> None:
        before = [list(held) for held in self.held]
        for target, (source, tokens) in moves.items():
            self.held[target][:tokens] = before[source][:tokens]

    def write(self, slot: int, start: int, ids: Sequence[int]) -> None:
        self.held[slot][start : start + len(ids)] = ids


def turn(ids: Sequence[int]) -> EngineTurn:
    params = Sampling(max_new_tokens=4)
    return EngineTurn("t", TokenIds.of(ids), params, max_new_tokens=4, stop_ids=frozenset(), seed=0)


def read(cache: Tokens, slot: Any, count: int) -> None:
    cache.write(slot.index, slot.read, slot.ids[slot.read : slot.read + count])
    slot.read = min(slot.read + count, len(slot.ids))


def test_turns_of_new_weights_use_the_memory_of_those_before() -> None:
    cache = Tokens()
    allocator = SlotAllocator(cache)  # type: ignore[arg-type]
    for version in range(3):
        allocator.assign([turn([version, 1]), turn([version, 2])])
        assert sorted(allocator.busy) == [0, 1], version
        for slot in list(allocator.busy.values()):
            read(cache, slot, 2)
            allocator.end(slot)
        allocator.forget()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_slot_holds_the_tokens_that_it_says(seed: int) -> None:
    rng = random.Random(seed)
    cache = Tokens()
    allocator = SlotAllocator(cache)  # type: ignore[arg-type]
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(1, 40))] for _ in range(4)]
    for _ in range(60):
        match rng.randrange(5):
            case 0 | 1:
                free = COUNT - len(allocator.busy)
                some = [rng.choice(prompts) for _ in range(rng.randrange(free + 1))]
                more = [[rng.randrange(2) for _ in range(rng.randrange(20))] for _ in some]
                allocator.assign([turn(a + b) for a, b in zip(some, more, strict=True)])
            case 2:
                for slot in allocator.busy.values():
                    read(cache, slot, rng.randrange(1, 50))
                    if slot.unread <= 1:
                        allocator.index(slot)
                        slot.ids.append(rng.randrange(2))
            case 3 if allocator.busy:
                allocator.end(rng.choice(list(allocator.busy.values())))
            case 4 if rng.random() < 0.1:
                allocator.forget()
        for slot in allocator._slots:
            assert cache.held[slot.index][: slot.read] == slot.ids[: slot.read]
            assert slot.turn is None or slot.unread > 0
        assert all(slot.index == index for index, slot in allocator.busy.items())
        assert sorted(slot.index for slot in allocator._slots) == list(range(COUNT))


def test_a_group_reads_its_prompt_once() -> None:
    cache = Tokens()
    allocator = SlotAllocator(cache)  # type: ignore[arg-type]
    ids = list(range(20))
    allocator.assign([turn(ids)])
    (leader,) = allocator.busy.values()
    read(cache, leader, 20)
    allocator.index(leader)
    allocator.assign([turn(ids) for _ in range(3)])
    assert [slot.read for slot in allocator.busy.values()] == [20, 19, 19, 19]
    # A conversation goes on where it was, if that is free.
    allocator.end(leader)
    allocator.assign([turn([*ids, 7, 8])])
    assert leader.turn is not None
    assert leader.read == 20


def test_running_turns_lie_side_by_side_and_what_others_left_is_found() -> None:
    cache = Tokens()
    allocator = SlotAllocator(cache)  # type: ignore[arg-type]
    prompts = [[number] * 9 for number in range(COUNT)]
    allocator.assign([turn(ids) for ids in prompts])
    slots = dict(allocator.busy)
    for slot in slots.values():
        read(cache, slot, 9)
    for index in (0, 2, 3):
        allocator.end(slots[index])
    allocator.assign([])  # of six slots, three run: 1, 4 and 5
    assert sorted(allocator.busy) == [0, 1, 2]
    assert all(cache.held[slot.index][:9] == slot.ids[:9] for slot in slots.values())
    # What an ended turn has left is found where it is now.
    allocator.assign([turn([*prompts[2], 7])])
    assert slots[2].turn is not None
    assert slots[2].read == 9
    assert max(allocator.busy) <= 4  # one hole is not worth a move
    assert cache.held[slots[2].index][:9] == prompts[2]


def test_one_turn_stays_where_its_conversation_was() -> None:
    cache = Tokens()
    allocator = SlotAllocator(cache)  # type: ignore[arg-type]
    allocator.assign([turn([number] * 9) for number in range(COUNT)])
    for slot in list(allocator.busy.values()):
        read(cache, slot, 9)
        allocator.end(slot)
    allocator.assign([turn([4] * 10)])
    assert list(allocator.busy) == [4]


@pytest.mark.parametrize("routed", [False, True])
def test_contents_of_slots_move_all_at_once(routed: bool) -> None:
    model = make_model(0)
    routing = RoutingShape(layers=2, top_k=1, experts=4) if routed else None
    cache = slot_attention.RaggedCache(
        model.config, torch.float32, running=8, max_context=128, routing=routing
    )
    held = [*cache.keys, *cache.values]
    for tensor in held:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in held]
    if cache.routes is not None:
        cache.routes[:] = np.arange(len(cache.routes)).reshape(-1, 1, 1, 1)
    moves = {0: (1, 100), 1: (0, 5), 2: (1, 7), 5: (3, 65), 3: (6, 64)}
    cache.move(moves)
    for was, now in zip(before, held, strict=True):
        for target, (source, tokens) in moves.items():
            assert torch.equal(now[target, :, :tokens], was[source, :, :tokens])
        for slot in (4, 6, 7):
            assert torch.equal(now[slot], was[slot])
    if cache.routes is not None:
        for target, (source, tokens) in moves.items():
            assert (cache.routes[target, :tokens] == source).all()


@pytest.mark.parametrize(
    ("slots", "where"),
    [
        ([3, 4, 5, 6], slice(3, 7)),
        ([3, 4, 6, 7], slice(3, 8)),
        ([0, 3, 7], torch.tensor([0, 3, 7])),
        ([0, 2, 5, 7], slice(0, 8)),
    ],
)
def test_keys_are_copied_only_of_turns_far_apart(
    slots: list[int], where: slice | torch.Tensor
) -> None:
    model = make_model(0)
    cache = slot_attention.RaggedCache(model.config, torch.float32, running=8, max_context=128)
    cache.plan([SlotRun(slot, 4, 1, row) for row, slot in enumerate(slots)], len(slots))
    [members] = cache.padded_runs
    assert type(members.slots) is type(where)
    assert str(members.slots) == str(where)
    assert members.rows == slice(0, len(slots))
    assert members.k == 16


def little_memory(monkeypatch: pytest.MonkeyPatch) -> slot_attention.RaggedCache:
    """Slots for 16 turns of 256 tokens, and memory for four."""
    monkeypatch.setattr(slot_cache, "CACHE_BYTES", 0)
    config = make_model(0).config
    cache = slot_attention.RaggedCache(config, torch.float32, running=16, max_context=256)
    assert (cache.count, cache.room, cache.limited) == (16, LEAST_TURNS * 256, True)
    return cache


@pytest.mark.parametrize("seed", range(6))
def test_slots_take_no_more_memory_than_there_is(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    cache = little_memory(monkeypatch)
    allocator = SlotAllocator(cache)
    openings = [[rng.randrange(9) for _ in range(120)] for _ in range(3)]
    longest = retracted = 0
    for _ in range(300):
        begun = {slot.turn: slot.used_at for slot in allocator.busy.values()}
        taken = allocator.retract()
        retracted += len(taken)
        # Those that began last, first to last.
        assert [begun[one] for one in taken] == sorted(begun.values())[len(begun) - len(taken) :]
        room, some = allocator.room, list[EngineTurn]()
        for one in [*taken, turn([*rng.choice(openings)[: rng.randrange(1, 120)], 9])]:
            room -= slot_cache.counted(len(one.prompt_ids))
            if room >= 0 and len(allocator.busy) + len(some) < cache.count:
                some.append(one)
        allocator.assign(some)
        assert cache.committed <= cache.room
        for slot in list(allocator.busy.values()):
            assert cache.committed_of(slot.index) >= len(slot.ids)
            slot.read = len(slot.ids)
            allocator.index(slot)
            slot.ids += [rng.randrange(9) for _ in range(rng.randrange(1, 8))]
            longest = max(longest, len(slot.ids))
            if len(slot.ids) > 240 or rng.random() < 0.02:
                allocator.end(slot)
    assert retracted
    assert longest > 200


def test_memory_of_a_released_slot_is_zero_and_others_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = little_memory(monkeypatch)
    held = [*cache.keys, *cache.values]
    for tensor in held:
        tensor.fill_(1.0)
    # A head's 256 tokens of 8 numbers are two pages of the operating system.
    cache.commit(3, 256)
    cache.release(3, 100)
    assert cache.committed == 128
    for tensor in held:
        assert tensor[3, :, :128].all()
        assert not tensor[3, :, 128:].any()
    cache.release(3)
    assert cache.committed == 0
    for tensor in held:
        assert not tensor[3].any()
        assert tensor[:3].all()
        assert tensor[4:].all()


@pytest.mark.parametrize(
    ("context", "kept"), [(64, torch.float32), (65, torch.bfloat16), (512, torch.bfloat16)]
)
def test_half_precision_draws_from_whole_keys_where_contexts_are_short(
    context: int, kept: torch.dtype
) -> None:
    model = make_model(0).bfloat16()
    cache = slot_attention.RaggedCache(model.config, model.dtype, running=8, max_context=context)
    assert {t.dtype for t in (*cache.keys, *cache.values)} == {kept}


@contextlib.asynccontextmanager
async def over_slots(spec: PolicySpec) -> AsyncIterator[EmbeddedEngine]:
    """A running engine whose turns have slots."""
    engine = EmbeddedEngine("e0", "solver", spec)
    await engine.start()
    try:
        assert isinstance(engine._host.batcher, SlotBatcher)
        yield engine
    finally:
        await engine.stop()


@pytest.mark.parametrize("context", [64, 128])
async def test_half_precision_draws_what_its_model_would(tmp_path: Path, context: int) -> None:
    transfer, model = transfer_in(tmp_path), make_model(0).bfloat16()
    async with over_slots(policy_spec("bfloat16", max_context=context)) as engine:
        await engine.update_weights(publish(transfer, model, 0), transfer)
        ids = prompt(random.Random(1))
        answer = await ask(engine, "r1", ids, max_new_tokens=12)
    expected = reference_logprobs(model, ids, answer.token_ids, 1.0)
    off = rounding(model, copy.deepcopy(model).double(), ids, answer.token_ids)
    assert answer.logprobs == pytest.approx(expected, abs=3 * off)
    # Weights that differ say something else.
    other = make_model(1).bfloat16()
    wrong = reference_logprobs(other, ids, answer.token_ids, 1.0)
    assert answer.logprobs != pytest.approx(wrong, abs=9 * off)


async def test_weights_that_are_no_numbers_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_batcher, "STEP_TOKENS", 16)
    transfer, model, broken = transfer_in(tmp_path), make_model(0), make_model(1)
    for parameter in broken.parameters():
        parameter.data.fill_(float("nan"))
    async with over_slots(policy_spec()) as engine:
        await engine.update_weights(publish(transfer, broken, 0), transfer)
        with pytest.raises(Exception, match="version 0"):
            await ask(engine, "r0", prompt(random.Random(0)), max_new_tokens=12)
        await engine.update_weights(publish(transfer, model, 1), transfer)
        ids = prompt(random.Random(1))
        answer = await ask(engine, "r1", ids, max_new_tokens=4)
    expected = reference_logprobs(model, ids, answer.token_ids, 1.0)
    assert answer.logprobs == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("lengths", [[1], [9, 3, 30], [5, 64, 17, 17], [100, 2, 90]])
@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [4, 2, 1, 5], [2, 4, 5, 7], [0, 2, 4, 6]])
def test_drawing_turns_attend_as_the_fused_kernel_does(
    lengths: list[int], slots: list[int]
) -> None:
    model = make_model(0)
    cache = slot_attention.RaggedCache(model.config, torch.float32, running=8, max_context=128)
    heads, dim = cache.heads, cache.keys[0].shape[3]
    generator = torch.Generator().manual_seed(slots[0])

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    for kept in (cache.keys[0], cache.values[0]):
        kept.copy_(numbers(*kept.shape))
    slots = slots[: len(lengths)]
    turns = enumerate(zip(slots, lengths, strict=True))
    cache.plan([SlotRun(s, n - 1, 1, row) for row, (s, n) in turns], len(lengths))
    query = numbers(1, heads * cache.repeat, len(lengths), dim)
    key, value = (numbers(1, heads, len(lengths), dim) for _ in range(2))
    layer = torch.nn.Module()
    layer.layer_idx = 0  # type: ignore[assignment]
    found, _ = slot_attention.slot_attention(layer, query, key, value, None, 0.3, cache)
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        assert torch.equal(cache.keys[0][slot, :, length - 1], key[0, :, row])
        assert torch.equal(cache.values[0][slot, :, length - 1], value[0, :, row])
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, row : row + 1],
            cache.keys[0][slot : slot + 1, :, :length],
            cache.values[0][slot : slot + 1, :, :length],
            scale=0.3,
            enable_gqa=True,
        )
        torch.testing.assert_close(found[0, row], expected[0, :, 0], atol=1e-5, rtol=1e-5)


async def test_turns_that_do_not_all_fit_into_memory_are_all_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_cache, "CACHE_BYTES", 0)
    transfer, model = transfer_in(tmp_path), make_model(0)
    retracted: list[EngineTurn] = []
    real = SlotAllocator.retract

    def told(self: SlotAllocator) -> list[EngineTurn]:
        retracted.extend(some := real(self))
        return some

    monkeypatch.setattr(SlotAllocator, "retract", told)
    rng = random.Random(6)
    prompts = [prompt(rng, 30, 90) for _ in range(24)]
    async with over_slots(policy_spec()) as engine:
        await engine.update_weights(publish(transfer, model, 0), transfer)
        answers = await asyncio.gather(
            *(ask(engine, f"r{i}", p, seed=i, max_new_tokens=120) for i, p in enumerate(prompts))
        )
        assert engine.load().generated_tokens == 24 * 120
    assert retracted
    for ids, answer in zip(prompts, answers, strict=True):
        assert 0 <= answer.cached_tokens < len(ids)
        expected = reference_logprobs(model, ids, answer.token_ids, 1.0)
        assert answer.logprobs == pytest.approx(expected, abs=2e-4)
