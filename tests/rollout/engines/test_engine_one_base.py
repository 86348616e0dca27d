"""Engines of several policies on one embedded model: adapters over one base, in one pass."""

from __future__ import annotations

import asyncio
import copy
import gc
import random
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from services.rollout.engines.embedded.adapters import AdaptedLayers, RowAdapter, RowSpan
from services.rollout.engines.embedded.batcher import SlotBatcher
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.embedded.host import EmbeddedHost
from services.rollout.engines.errors import (
    EngineDied,
    NonFiniteLogits,
    TurnReturned,
    WeightsRefused,
)
from services.rollout.engines.factory import make_host
from services.rollout.engines.requests import EngineResponse, ScoreRequest
from tests.rollout.engines.asking import ask, prompt
from tests.rollout.engines.models import (
    make_model,
    policy_spec,
    publish_tensors,
    reference_logprobs,
    transfer_in,
)
from tests.rollout.engines.trained_adapters import TrainedAdapter, lora_spec
from tests.support.architectures import ARCHITECTURES, make
from tests.support.training import rounding
from tests.support.waiting import PATIENCE, until
from troupe.job import LoraSpec, PolicySpec
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb

ROLES = ("solver", "checker", "judge")
PROMPT = [5, 6, 7]


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return transfer_in(tmp_path)


def specs_of(dtype: str = "float32", **engine: object) -> dict[str, PolicySpec]:
    """Three policies that train adapters, of different ranks, and one that is the bare base."""
    specs = {name: lora_spec(rank=4 + 2 * at, **engine) for at, name in enumerate(ROLES)}
    specs["frozen"] = policy_spec(**engine).model_copy(update={"trainable": False})
    for name, spec in specs.items():
        model = spec.language_model.model_copy(update={"dtype": dtype})
        specs[name] = spec.model_copy(update={"model": model})
    return specs


class Team:
    """Engines of several policies on one host, and what each should serve."""

    def __init__(self, specs: dict[str, PolicySpec], transfer: Transfer, **options: Any) -> None:
        host = make_host("job.solver.0@w", specs, **options)
        assert isinstance(host, EmbeddedHost)
        self.host, self.transfer = host, transfer
        self.engines = {name: host.engine(f"job.{name}.0@w", name) for name in specs}
        dtype = getattr(torch, specs["solver"].language_model.dtype or "float32")
        self.base: PreTrainedModel = make_model(0).to(dtype)
        self.trained = {
            name: TrainedAdapter(at, base=self.base, rank=4 + 2 * at, dtype=dtype)
            for at, name in enumerate(ROLES)
        }

    async def start(self) -> None:
        await asyncio.gather(*(engine.start() for engine in self.engines.values()))
        for name in self.engines:
            await self.update(name, 0)

    async def update(self, name: str, version: int) -> common_pb.WeightsRef:
        """Publish what the policy is now, and load it."""
        if name == "frozen":
            named = dict(self.base.named_parameters())
            ref = publish_tensors(self.transfer, named, version, name)
        else:
            ref = self.trained[name].publish(self.transfer, version, name)
        await self.engines[name].accepts(ref, self.transfer)
        await self.engines[name].update_weights(ref, self.transfer)
        return ref

    def wanted(self, name: str, ids: list[int], response: list[int]) -> list[float]:
        if name == "frozen":
            return reference_logprobs(self.base, ids, response)
        return self.trained[name].logprobs(ids, response)

    def off(self, name: str, ids: list[int], response: list[int]) -> float:
        """How far log-probs may be off: bfloat16 rounds attention of another kind otherwise."""
        if self.base.dtype == torch.float32:
            return 2e-4
        model = self.base if name == "frozen" else self.trained[name].model
        return 3 * rounding(model, copy.deepcopy(model).double(), ids, response)

    def assert_is(self, name: str, ids: list[int], answer: EngineResponse) -> None:
        """Its log-probs match this policy and no other."""
        wanted = self.wanted(name, ids, answer.token_ids)
        off = self.off(name, ids, answer.token_ids)
        assert answer.logprobs == pytest.approx(wanted, abs=off)
        for other in self.engines.keys() - {name}:
            theirs = self.wanted(other, ids, answer.token_ids)
            assert answer.logprobs != pytest.approx(theirs, abs=2 * off)


@asynccontextmanager
async def team(
    transfer: Transfer, specs: dict[str, PolicySpec] | None = None, **options: Any
) -> AsyncIterator[Team]:
    found = Team(specs or specs_of(), transfer, **options)
    await found.start()
    try:
        yield found
    finally:
        for engine in found.engines.values():
            await engine.stop()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many adapters, or none, rows of each pass took."""
    counts: list[int] = []
    real = AdaptedLayers.passing

    def passing(self: AdaptedLayers, planned: Sequence[RowSpan]) -> Any:
        counts.append(len(planned))
        return real(self, planned)

    monkeypatch.setattr(AdaptedLayers, "passing", passing)
    return counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("deterministic", [False, True])
async def test_each_policy_of_a_shared_pass_draws_from_its_own_weights(
    dtype: str, deterministic: bool, transfer: Transfer, spans: list[int]
) -> None:
    async with team(transfer, specs_of(dtype), deterministic=deterministic) as found:
        rng = random.Random(1)
        asked = [(name, prompt(rng, 3, 60)) for _ in range(6) for name in found.engines]
        answers = await asyncio.gather(
            *(
                ask(found.engines[name], f"r{number}", ids, max_new_tokens=12, seed=number)
                for number, (name, ids) in enumerate(asked)
            )
        )
        for (name, ids), answer in zip(asked, answers, strict=True):
            found.assert_is(name, ids, answer)
        assert max(spans) >= 4
        assert [engine.load().generated_tokens for engine in found.engines.values()] == [72] * 4


async def test_the_base_is_in_memory_once_where_it_was_published(transfer: Transfer) -> None:
    async with team(transfer) as found:
        model, base = found.host.model, found.host.base
        assert model is not None
        assert base is not None
        places = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
        assert places == {name: base.tensors[name].data_ptr() for name in places}
        found.trained["solver"].step(30)
        await found.update("solver", 1)
        await found.update("frozen", 1)
        assert places == {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
        # Nor was it looked at again.
        assert found.host.base is base
        assert found.engines["solver"].last_update.way == "adapter"  # type: ignore[union-attr]


async def test_a_turn_ends_with_the_version_that_it_began_with(transfer: Transfer) -> None:
    async with team(transfer) as found:
        engine = found.engines["checker"]
        one = engine._live.adapter
        assert one is not None
        gone = weakref.ref(one)
        del one
        old = copy.deepcopy(found.trained["checker"])
        long = asyncio.create_task(ask(engine, "long", PROMPT, max_new_tokens=200, seed=1))
        await until(lambda: engine.load().running == 1)
        found.trained["checker"].step(31)
        assert (await found.update("checker", 1)) is not None
        assert engine.last_update is not None
        assert engine.last_update.exposed_seconds == 0.0
        young = await ask(engine, "young", PROMPT, max_new_tokens=6, seed=1)
        assert [(span.version, span.end) for span in young.versions] == [(1, 6)]
        found.assert_is("checker", PROMPT, young)
        if not long.done():
            assert engine.live_versions == [0, 1]
        answer = await long
        assert [(span.version, span.end) for span in answer.versions] == [(0, 200)]
        assert answer.logprobs == pytest.approx(old.logprobs(PROMPT, answer.token_ids), abs=2e-4)
        assert engine.live_versions == []
        await ask(engine, "next", PROMPT, max_new_tokens=2)  # whose pass lets the former go
        gc.collect()
        assert gone() is None


async def test_turns_are_returned_where_the_job_wants_that(transfer: Transfer) -> None:
    async with team(transfer, specs_of(in_flight="restart")) as found:
        engine, other = found.engines["solver"], found.engines["judge"]
        turns = [
            asyncio.create_task(ask(one, "long", PROMPT, max_new_tokens=200, seed=1))
            for one in (engine, other)
        ]
        await until(lambda: all(one.load().running == 1 for one in (engine, other)))
        await found.update("solver", 1)
        with pytest.raises(Exception, match="given back"):
            await turns[0]
        assert [span.version for span in (await turns[1]).versions] == [0]


async def test_turns_by_an_adapter_whose_base_goes_are_returned(transfer: Transfer) -> None:
    """An engine alone, which moves to a policy with another base while turns run."""
    engine = EmbeddedEngine("e0", "solver", lora_spec())
    await engine.start()
    await engine.update_weights(TrainedAdapter(1).publish(transfer, 0), transfer)
    long = asyncio.create_task(ask(engine, "long", PROMPT, max_new_tokens=200))
    await until(lambda: engine.load().running == 1)
    other = TrainedAdapter(3, base_seed=5)
    await engine.update_weights(other.publish(transfer, 1), transfer)
    with pytest.raises(TurnReturned, match="has another base"):
        await long
    answer = await ask(engine, "r", PROMPT)
    assert answer.logprobs == pytest.approx(other.logprobs(PROMPT, answer.token_ids), abs=2e-4)
    await engine.stop()


async def test_policies_and_versions_share_no_prefix(transfer: Transfer) -> None:
    ids = prompt(random.Random(3), 60, 60)
    async with team(transfer) as found:

        async def cached(name: str, request: str) -> int:
            answer = await ask(found.engines[name], request, ids, max_new_tokens=4)
            found.assert_is(name, ids, answer)
            return answer.cached_tokens

        # Together, when one of them reads the prompt for its own policy only, and one by one.
        assert await asyncio.gather(*(cached(name, "a") for name in found.engines)) == [0] * 4
        assert all([await cached(name, "b") > 50 for name in found.engines])
        found.trained["judge"].step(32)
        await found.update("judge", 1)
        assert await cached("judge", "c") == 0
        assert await cached("solver", "c") > 50
        assert await cached("judge", "d") > 50


async def test_a_deterministic_turn_is_bitwise_the_same_in_any_company(transfer: Transfer) -> None:
    rng = random.Random(4)
    asked = [(name, prompt(rng, 1, 90), seed) for seed in range(6) for name in (*ROLES, "frozen")]

    async def answer(found: Team, number: int) -> tuple[list[int], list[float]]:
        name, ids, seed = asked[number]
        turn = await ask(found.engines[name], f"r{number}", ids, max_new_tokens=10, seed=seed)
        return turn.token_ids, turn.logprobs

    async with team(transfer, deterministic=True) as found:
        alone = []
        for number in range(len(asked)):
            assert found.host.batcher is not None
            found.host.batcher.swap(lambda: None)  # forgets every key and value
            alone.append(await answer(found, number))
    order = list(range(len(asked)))
    rng.shuffle(order)
    async with team(transfer, deterministic=True) as found:
        together = await asyncio.gather(*(answer(found, number) for number in order))
    assert [together[order.index(number)] for number in range(len(asked))] == alone


async def test_an_adapter_whose_products_mix_rows_is_noticed_when_it_is_loaded(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixing(self: Any, name: str, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        sums += 1e-3 * inputs.mean()  # of all rows

    monkeypatch.setattr(AdaptedLayers, "_add_fixed", mixing)
    found = Team(specs_of(), transfer, deterministic=True)
    engine = found.engines["solver"]
    await engine.start()
    with pytest.raises(Exception, match="depend on what else is in the batch"):
        await found.update("solver", 0)
    assert engine.state == common_pb.ENGINE_STATE_STALE
    await engine.stop()


async def test_continuations_are_scored_by_their_own_policy(transfer: Transfer) -> None:
    asked = [ScoreRequest((5, 6, 7), (8, 9)), ScoreRequest((5, 6), (7, 8, 9))]
    async with team(transfer) as found:
        for name, engine in found.engines.items():
            scored = await engine.score(asked, 1.0, deadline_seconds=PATIENCE)
            for one, logprobs in zip(asked, scored.logprobs, strict=True):
                wanted = found.wanted(name, list(one.prompt_ids), list(one.ids))
                assert logprobs == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize("name", ["judge", "frozen"])
async def test_another_base_is_refused_by_the_tensor_that_differs(
    name: str, transfer: Transfer
) -> None:
    async with team(transfer) as found:
        with torch.no_grad():
            found.base.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4] += 1.0
        found.trained["judge"] = TrainedAdapter(3, base=found.base, rank=8)
        with pytest.raises(
            WeightsRefused, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' differs"
        ) as info:
            await found.update(name, 1)
        assert "engine.share: never" in (info.value.remedy or "")
        assert found.engines[name].version == 0
        other = Team(specs_of(), transfer)
        answer = await ask(found.engines["solver"], "r", PROMPT)
        assert answer.logprobs == pytest.approx(
            other.wanted("solver", PROMPT, answer.token_ids), abs=2e-4
        )


async def test_of_two_bases_that_are_loaded_at_once_one_is_refused(transfer: Transfer) -> None:
    found = Team(specs_of(), transfer)
    names = ("solver", "judge")
    for name in names:
        await found.engines[name].start()
    found.trained["judge"] = TrainedAdapter(3, base_seed=5, rank=8)
    ended = await asyncio.gather(*(found.update(name, 0) for name in names), return_exceptions=True)
    [refused] = [one for one in ended if isinstance(one, BaseException)]
    assert isinstance(refused, WeightsRefused), refused
    served = names[1 - ended.index(refused)]
    assert found.engines[names[ended.index(refused)]].version is None
    answer = await ask(found.engines[served], "r", PROMPT)
    wanted = found.trained[served].logprobs(PROMPT, answer.token_ids)
    assert answer.logprobs == pytest.approx(wanted, abs=2e-4)
    for name in names:
        await found.engines[name].stop()


async def test_the_name_of_one_adapter_with_the_weights_of_another_never_serves(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with team(transfer) as found:
        ref = found.trained["solver"].publish(transfer, 1)
        other = TrainedAdapter(40, base=found.base).publish(transfer, 2)
        tensors = transfer.get(other.key)
        monkeypatch.setattr(transfer, "get", lambda key, **_: tensors)
        with pytest.raises(WeightsRefused, match=f"version 1 has {ref.checksum}"):
            await found.engines["solver"].update_weights(ref, transfer)
        assert found.engines["solver"].version == 0
        found.assert_is("solver", PROMPT, await ask(found.engines["solver"], "r", PROMPT))


async def test_an_adapter_with_nan_is_refused_and_the_former_version_serves(
    transfer: Transfer,
) -> None:
    async with team(transfer) as found:
        broken = copy.deepcopy(found.trained["solver"])
        named = dict(broken.model.named_parameters())
        place = "base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight"
        named[place].data[2, 1] = float("nan")
        ref = broken.publish(transfer, 1)
        with pytest.raises(WeightsRefused, match=r"up_proj\.lora_B\.weight' has numbers that are"):
            await found.engines["solver"].update_weights(ref, transfer)
        assert found.engines["solver"].version == 0
        found.assert_is("solver", PROMPT, await ask(found.engines["solver"], "r", PROMPT))


async def test_a_policy_that_computes_nan_spoils_no_other_turn(transfer: Transfer) -> None:
    """Finite weights whose products are not: found only when they are computed."""
    rng = random.Random(5)
    async with team(transfer) as found:
        for name, parameter in found.trained["solver"].model.named_parameters():
            if ".lora_" in name:
                parameter.data.fill_(1e30)
        await found.update("solver", 1)
        names = ["solver", "checker", "judge", "frozen"] * 8
        asked = [(name, prompt(rng, 3, 80)) for name in names]
        answers = await asyncio.gather(
            *(
                ask(found.engines[name], f"r{number}", ids, max_new_tokens=20)
                for number, (name, ids) in enumerate(asked)
            ),
            return_exceptions=True,
        )
        for (name, ids), answer in zip(asked, answers, strict=True):
            if name == "solver":
                assert isinstance(answer, NonFiniteLogits)
                assert "version 1" in str(answer)
            else:
                assert isinstance(answer, EngineResponse), answer
                assert answer.logprobs == pytest.approx(
                    found.wanted(name, ids, answer.token_ids), abs=2e-4
                )


async def test_the_death_of_the_model_ends_all_engines_and_one_start_brings_it_back(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = 0
    real = SlotBatcher.start

    def start(self: SlotBatcher) -> None:
        nonlocal built
        built += 1
        real(self)

    monkeypatch.setattr(SlotBatcher, "start", start)
    async with team(transfer) as found:
        turns = [
            asyncio.create_task(ask(engine, "long", PROMPT, max_new_tokens=200))
            for engine in found.engines.values()
        ]
        await until(lambda: all(one.load().running for one in found.engines.values()))

        def explode(*_: Any, **__: Any) -> None:
            raise RuntimeError("out of cards")

        assert found.host.model is not None
        found.host.model.forward = explode
        ended = await asyncio.gather(*turns, return_exceptions=True)
        assert all(isinstance(one, EngineDied) for one in ended)
        states = {engine.state for engine in found.engines.values()}
        assert states == {common_pb.ENGINE_STATE_DEAD}
        await found.start()
        assert built == 2
        for name, engine in found.engines.items():
            assert engine.restarts == 1
            found.assert_is(name, PROMPT, await ask(engine, "r", PROMPT))


async def test_the_model_sleeps_when_all_policies_do_and_wakes_with_the_first(
    transfer: Transfer,
) -> None:
    async with team(transfer) as found:
        *most, last = found.engines
        for name in most:
            await found.engines[name].sleep()
        assert found.host.model is not None
        found.assert_is(last, PROMPT, await ask(found.engines[last], "r", PROMPT))
        await found.engines[last].sleep()
        assert found.host.model is None
        assert found.host.batcher is None
        await found.engines["checker"].wake()
        await found.update("checker", 1)
        answer = await ask(found.engines["checker"], "s", PROMPT)
        found.assert_is("checker", PROMPT, answer)
        model = found.host.model
        for name in found.engines:
            await found.engines[name].wake()
        assert found.host.model is model


async def test_an_engine_that_stops_leaves_the_model_to_the_others(transfer: Transfer) -> None:
    async with team(transfer) as found:
        await found.engines["solver"].stop()
        found.assert_is("judge", PROMPT, await ask(found.engines["judge"], "r", PROMPT))
        for engine in found.engines.values():
            await engine.stop()
        assert found.host.model is None


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
async def test_policies_share_a_mixture_of_experts(name: str, transfer: Transfer) -> None:
    targets, base = ["q_proj", "o_proj"], make(name)
    lora = LoraSpec(rank=4, alpha=8, target_modules=targets)
    spec = policy_spec(config=ARCHITECTURES[name]).model_copy(update={"lora": lora})
    replayed = name == "qwen3_moe"
    host = make_host("job.a.0@w", {"a": spec, "b": spec}, routed_experts=replayed)
    engines, trained = [], []
    for number, policy in enumerate(("a", "b")):
        engines.append(host.engine(f"job.{policy}.0@w", policy))
        trained.append(TrainedAdapter(number, base=base, targets=targets))
        await engines[-1].start()
        ref = trained[-1].publish(transfer, 0, policy)
        await engines[-1].update_weights(ref, transfer)
    asked = [prompt(random.Random(seed), 4, 40) for seed in range(6)]
    answers = await asyncio.gather(
        *(ask(engines[at % 2], f"r{at}", ids, max_new_tokens=8) for at, ids in enumerate(asked))
    )
    for at, (ids, answer) in enumerate(zip(asked, answers, strict=True)):
        own, other = (trained[n].logprobs(ids, answer.token_ids) for n in (at % 2, 1 - at % 2))
        assert answer.logprobs == pytest.approx(own, abs=3e-4)
        assert answer.logprobs != pytest.approx(other, abs=1e-3)
        if replayed:
            assert len(answer.routed_experts) == len(ids) + len(answer.token_ids) - 1
    for engine in engines:
        await engine.stop()


def test_layers_that_get_other_rows_than_the_pass_are_refused() -> None:
    """Experts that each get some of the rows: which adapters those take is not known."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    layers = AdaptedLayers(model)
    layers.cover(["0"])
    adapter = RowAdapter({"0": (torch.zeros(4, 2), torch.zeros(2, 4))}, 1.0)
    with (
        torch.inference_mode(),
        layers.passing([RowSpan(3, adapter)]),
        pytest.raises(RuntimeError, match="layer '0' computes 2 rows of a pass of 3"),
    ):
        model(torch.zeros(2, 4))
