"""The deterministic engine: bitwise the same answer, whatever else happens. No tolerances here."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from services.rollout.engines.embedded import cache as slot_cache
from services.rollout.engines.embedded.batcher import SlotBatcher
from services.rollout.engines.embedded.cache import LENGTHS, SlotAllocator, padded
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.errors import EngineStartFailed
from services.rollout.engines.requests import EngineResponse
from services.rollout.engines.turns import EngineTurn
from tests.rollout.engines.asking import prompt
from tests.rollout.engines.models import CONFIG, make_model, policy_spec, publish, transfer_in
from tests.support.waiting import PATIENCE, until
from troupe.job import EngineSpec, ModelSpec, PolicySpec
from troupe.rpc.errors import FailedPrecondition
from troupe.transfer import Transfer
from troupe.workflow.backend import Sampling

Answer = tuple[list[int], list[float], str]


@dataclass(frozen=True)
class Asked:
    """One turn; `sampling` without the seed is the agent's."""

    ids: list[int]
    seed: int
    sampling: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return transfer_in(tmp_path)


@asynccontextmanager
async def fresh(
    transfer: Transfer, weights: int = 0, spec: PolicySpec | None = None
) -> AsyncIterator[EmbeddedEngine]:
    """An engine that knows nothing but weights `weights`."""
    engine = EmbeddedEngine("e0", "solver", spec or policy_spec(), deterministic=True)
    await engine.start()
    await engine.update_weights(publish(transfer, make_model(weights), weights), transfer)
    try:
        yield engine
    finally:
        await engine.stop()


async def answer(engine: EmbeddedEngine, name: str, asked: Asked) -> Answer:
    params = Sampling(**{"max_new_tokens": 8, "seed": asked.seed, **asked.sampling})
    return bits(await engine.generate(name, asked.ids, params, deadline_seconds=PATIENCE))


def bits(given: EngineResponse) -> Answer:
    return given.token_ids, given.logprobs, given.finish_reason


def some_turns(rng: random.Random, count: int) -> list[Asked]:
    """Prompts of all lengths, many beginning like another one."""
    turns: list[Asked] = []
    for number in range(count):
        ids = prompt(rng, 1, 150)
        if turns and rng.random() < 0.6:
            other = rng.choice(turns).ids
            ids = (other[: rng.randint(1, len(other))] + prompt(rng, 1, 40))[:230]
        if turns and rng.random() < 0.2:
            ids = rng.choice(turns).ids
        sampling: dict[str, Any] = {"max_new_tokens": rng.randint(1, 20)}
        sampling |= rng.choice(
            [{}, {}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 5}]
        )
        turns.append(Asked(ids, seed=number, sampling=sampling))
    return turns


async def alone(transfer: Transfer, turns: list[Asked], weights: int = 0) -> list[Answer]:
    """Each turn by itself, the prefix cache cut off by new weights in between."""
    answers = []
    async with fresh(transfer, weights) as engine:
        for number, asked in enumerate(turns):
            assert engine._host.batcher is not None
            engine._host.batcher.swap(lambda: None)  # forgets every key and value
            answers.append(await answer(engine, f"alone{number}", asked))
    return answers


@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.slow)])
async def test_a_turn_is_bitwise_the_same_alone_and_in_any_company(
    transfer: Transfer, seed: int
) -> None:
    rng = random.Random(seed)
    turns = some_turns(rng, 60)
    expected = await alone(transfer, turns)
    for running in (1, 7, 64):
        # `running` changes the shape of a pass, and so may change bits between specifications.
        spec = policy_spec(max_running=64)
        order = list(range(len(turns)))
        rng.shuffle(order)
        got: dict[int, Answer] = {}
        async with fresh(transfer, spec=spec) as engine:
            room = asyncio.Semaphore(running)

            async def one(
                number: int,
                engine: EmbeddedEngine = engine,
                room: asyncio.Semaphore = room,
                got: dict[int, Answer] = got,
            ) -> None:
                async with room:
                    await asyncio.sleep(rng.random() * 0.01)
                    got[number] = await answer(engine, f"r{number}", turns[number])

            await asyncio.gather(*(one(number) for number in order))
        assert [got[number] for number in range(len(turns))] == expected


async def test_a_turn_that_is_computed_again_for_lack_of_memory_is_bitwise_the_same(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(2)
    turns = [Asked(prompt(rng, 90, 110), seed, {"max_new_tokens": 60}) for seed in range(12)]
    expected = await alone(transfer, turns)
    monkeypatch.setattr(slot_cache, "CACHE_BYTES", 0)  # four of 64 turns fit at full length
    retracted: list[EngineTurn] = []
    real = SlotAllocator.retract

    def told(self: SlotAllocator) -> list[EngineTurn]:
        retracted.extend(some := real(self))
        return some

    monkeypatch.setattr(SlotAllocator, "retract", told)
    async with fresh(transfer) as engine:
        asked = (answer(engine, f"r{number}", turn) for number, turn in enumerate(turns))
        assert await asyncio.gather(*asked) == expected
    assert retracted


async def test_a_conversation_is_the_same_whether_its_beginning_was_cached(
    transfer: Transfer,
) -> None:
    rng = random.Random(11)
    opening, more = prompt(rng, 70, 80), prompt(rng, 10, 20)
    async with fresh(transfer) as engine:
        first = await answer(engine, "first", Asked(opening, 1))
        longer = [*opening, *first[0], *more]
        generation = await engine.generate(
            "second", longer, Sampling(max_new_tokens=8, seed=2), deadline_seconds=PATIENCE
        )
        # Keys and values of the response, drawn one by one, serve as if they had been read.
        assert generation.cached_tokens >= len(opening) + len(first[0]) - 1
    async with fresh(transfer) as engine:
        cold = await engine.generate(
            "second", longer, Sampling(max_new_tokens=8, seed=2), deadline_seconds=PATIENCE
        )
    assert cold.cached_tokens == 0
    assert bits(cold) == bits(generation)


async def test_turns_that_are_aborted_and_retried_change_nothing(transfer: Transfer) -> None:
    rng = random.Random(5)
    turns = some_turns(rng, 30)
    expected = await alone(transfer, turns)
    async with fresh(transfer) as engine:
        doomed = [
            asyncio.ensure_future(answer(engine, f"d{i}", Asked(t.ids, i, {"max_new_tokens": 25})))
            for i, t in enumerate(turns)
        ]
        await until(lambda: engine.load().generated_tokens > 40)
        again = [asyncio.ensure_future(answer(engine, f"r{i}", t)) for i, t in enumerate(turns)]
        for number, task in enumerate(doomed):
            if number % 2:
                task.cancel()
            else:
                await engine.abort(f"d{number}")
        assert await asyncio.gather(*again) == expected
        await asyncio.gather(*doomed, return_exceptions=True)


async def test_weights_that_return_give_the_same_answers(transfer: Transfer) -> None:
    turns = some_turns(random.Random(8), 12)
    expected = await alone(transfer, turns)
    async with fresh(transfer, weights=1) as engine:
        others = await asyncio.gather(*(answer(engine, f"o{i}", t) for i, t in enumerate(turns)))
        key = publish(transfer, make_model(0), 2)
        await engine.update_weights(key, transfer)
        again = await asyncio.gather(*(answer(engine, f"r{i}", t) for i, t in enumerate(turns)))
    assert others != expected
    assert again == expected


async def test_a_restarted_engine_gives_the_same_answers(transfer: Transfer) -> None:
    turns = some_turns(random.Random(9), 12)
    async with fresh(transfer) as engine:
        before = await asyncio.gather(*(answer(engine, f"r{i}", t) for i, t in enumerate(turns)))
        engine._die("the plug was pulled")
        await engine.start()
        await engine.update_weights(publish(transfer, make_model(0), 0), transfer)
        after = await asyncio.gather(*(answer(engine, f"a{i}", t) for i, t in enumerate(turns)))
    assert before == after


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 80},
        {"model_type": "llama", "num_key_value_heads": 4, "hidden_size": 48, "head_dim": 12},
    ],
    ids=["odd-heads", "llama"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_other_shapes_and_types(
    transfer: Transfer, changes: dict[str, Any], dtype: str
) -> None:
    config = {**CONFIG, **changes}
    spec = PolicySpec.model_validate(
        {
            "model": ModelSpec(config=config, tokenizer="unused", dtype=dtype),  # type: ignore[arg-type]
            "engine": EngineSpec(max_running=20, max_context=256),
        }
    )
    torch.manual_seed(3)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=getattr(torch, dtype)
    )
    turns = some_turns(random.Random(4), 20)
    ref = publish(transfer, model, 0)
    answers = []
    for together in (True, False):
        engine = EmbeddedEngine("e0", "solver", spec, deterministic=True)
        await engine.start()
        await engine.update_weights(ref, transfer)
        if together:
            answers.append(
                await asyncio.gather(*(answer(engine, f"r{i}", t) for i, t in enumerate(turns)))
            )
        else:
            answers.append([await answer(engine, f"r{i}", t) for i, t in enumerate(turns)])
        await engine.stop()
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "config",
    [
        {**CONFIG, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32},
        {**CONFIG, "model_type": "mistral", "sliding_window": 32},
    ],
    ids=["experts", "sliding-window"],
)  # fmt: skip
async def test_models_without_fixed_shapes_are_refused(config: dict[str, Any]) -> None:
    spec = PolicySpec(model=ModelSpec(config=config, tokenizer="unused"))
    engine = EmbeddedEngine("e0", "solver", spec, deterministic=True)
    with pytest.raises(EngineStartFailed, match="deterministic") as info:
        await engine.start()
    assert info.value.field == "policies.solver.model"
    await engine.stop()


async def test_a_machine_that_mixes_rows_is_noticed_when_weights_are_loaded(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SlotBatcher._forward

    def mixing(self: Any, *planned: Any) -> torch.Tensor:
        logits = real(self, *planned)
        return logits + 1e-6 * logits.mean()  # of all rows: as a kernel that splits them unevenly

    monkeypatch.setattr(SlotBatcher, "_forward", mixing)
    with pytest.raises(FailedPrecondition, match=r"pipeline\.deterministic") as info:
        async with fresh(transfer):
            pass
    assert info.value.kind == "not_deterministic"


def test_padded_lengths_follow_from_the_position_alone() -> None:
    assert list(LENGTHS) == sorted(set(LENGTHS))
    assert [padded(p) for p in (0, 63, 64, 191, 192, 255, 256, 700)] == [
        64, 64, 128, 192, 256, 256, 384, 768,
    ]  # fmt: skip
    assert all(length % 64 == 0 and length > p for p in range(3000) for length in [padded(p)])
