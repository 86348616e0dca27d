"""What Troupe relies on in every inference server: the same checks against the test double, a real
SGLang and a real vLLM.

The real ones are launched when the environment names them (see `real_server.py`, `real_vllm.py`);
those are marked slow. What only one kind has is checked in files of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.rollout.engines.errors import BadTurn, EngineStale, ScoreRefused
from services.rollout.engines.requests import EngineResponse, ScoreRequest
from services.rollout.engines.servers.engine import ServerEngine
from services.rollout.engines.servers.host import ServerHost
from services.rollout.engines.servers.interface import AdapterNeeds
from services.rollout.engines.servers.loaders import UpdateSetting
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.vllm.engine import VllmEngine
from tests.rollout.engines.models import (
    VOCABULARY,
    greedy_tokens,
    policy_spec,
    publish,
    reference_logprobs,
    transfer_in,
)
from tests.rollout.engines.real_server import RealServer, running
from tests.rollout.engines.real_vllm import TINY, make_model
from tests.rollout.engines.teams import BASE, RANKS, Team, team_specs
from tests.rollout.engines.trained_adapters import LAYERS, TrainedAdapter
from tests.support.fake_sglang import FakeSglang, serve
from tests.support.waiting import PATIENCE, until
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling

PROMPT = [5, 6]
NEEDS = AdapterNeeds(max(RANKS.values()), LAYERS, len(RANKS))
ENGINES: dict[str, type[ServerEngine]] = {"sglang": SglangEngine, "vllm": VllmEngine}


@dataclass
class Served:
    """A running server. `real`: it is no double."""

    kind: str
    url: str
    real: bool = True

    async def engine(self, update: UpdateSetting = "disk") -> ServerEngine:
        """An engine of one policy, attached to it."""
        settings = {} if update == "disk" else {"update": update}
        spec = policy_spec(
            config=TINY,
            kind=self.kind,
            urls=[self.url],
            start_timeout_seconds=PATIENCE,
            **settings,
        )
        engine = ENGINES[self.kind]("e0", "solver", spec)
        await engine.start()
        assert engine.state == common_pb.ENGINE_STATE_STALE
        return engine

    def team(self, transfer: Transfer) -> Team:
        """The engines of a team, attached to it."""
        specs = team_specs(
            config=TINY, kind=self.kind, urls=[self.url], start_timeout_seconds=PATIENCE
        )
        base = make_model(0)
        roles = {name: TrainedAdapter(1, rank=rank, base=base) for name, rank in RANKS.items()}
        return Team(ServerHost("job.planner.0@w", specs, ENGINES[self.kind]), transfer, roles)


@pytest.fixture(
    scope="module",
    params=[
        "double",
        pytest.param("sglang", marks=pytest.mark.slow),
        pytest.param("vllm", marks=pytest.mark.slow),
    ],
)
def launched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, RealServer | None]]:
    """The kind of a server, and a real one of that kind; None for the double."""
    if request.param == "double":
        yield "sglang", None
        return
    place = tmp_path_factory.mktemp(request.param)
    launch = ["--lora-backend", "torch_native"] if request.param == "sglang" else []
    with running(
        place, model=make_model(0), launch=launch, kind=request.param, adapters=NEEDS
    ) as server:
        yield request.param, server


@pytest.fixture
async def served(launched: tuple[str, RealServer | None]) -> AsyncIterator[Served]:
    kind, server = launched
    if server is not None:
        yield Served(kind, server.url)
        return
    fake = FakeSglang(TINY)
    fake.info |= {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": list(LAYERS)}
    async with serve(fake) as url:
        yield Served(kind, url, real=False)


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return transfer_in(tmp_path)


async def ask(
    engine: ServerEngine, name: str, ids: list[int], **sampling: object
) -> EngineResponse:
    params = Sampling(**{"max_new_tokens": 8, **sampling})  # type: ignore[arg-type]
    return await engine.generate(name, ids, params, deadline_seconds=PATIENCE)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
async def test_logprobs_are_those_of_a_plain_forward_pass(
    served: Served, temperature: float, transfer: Transfer
) -> None:
    engine, model = await served.engine(), make_model(3)
    exposed = await engine.update_weights(publish(transfer, model, 3), transfer)
    assert exposed > 0
    assert (engine.state, engine.version) == (common_pb.ENGINE_STATE_HEALTHY, 3)
    prompts = [[(7 * i + k) % VOCABULARY for k in range(5 + i)] for i in range(12)]
    answers = await asyncio.gather(
        *(
            ask(engine, f"t{temperature}-{i}", p, temperature=temperature)
            for i, p in enumerate(prompts)
        )
    )
    for p, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 8
        assert [(s.version, s.start, s.end) for s in answer.versions] == [(3, 0, 8)]
        expected = reference_logprobs(model, p, answer.token_ids, temperature or 1.0)
        assert answer.logprobs == pytest.approx(expected, abs=2e-4)
    assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY
    await engine.stop()


async def test_a_stop_id_ends_a_turn_and_belongs_to_it(served: Served, transfer: Transfer) -> None:
    engine = await served.engine()
    await engine.update_weights(publish(transfer, make_model(0), 0), transfer)
    whole = await ask(engine, "whole", [3, 4], temperature=0.0)
    assert whole.finish_reason == "length"
    stop = whole.token_ids[4]
    ended = await ask(engine, "stop", [3, 4], temperature=0.0, stop_token_ids=(stop,))
    assert ended.finish_reason == "stop"
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    with pytest.raises(BadTurn, match="vocabulary"):
        await ask(engine, "outside", [VOCABULARY])
    assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY
    await engine.stop()


async def test_scores_are_those_of_a_plain_forward_pass(served: Served, transfer: Transfer) -> None:
    engine = await served.engine()
    models = [make_model(seed) for seed in (4, 5)]
    rng = random.Random(2)
    asked = [
        ScoreRequest(
            tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 7, 40)))),
            tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))),
        )
        for _ in range(6)
    ]
    asked += [ScoreRequest(asked[2].prompt_ids, (token,)) for token in range(5)]
    asked.append(ScoreRequest((1,) * 230, (2,) * 10))
    for version, model in enumerate(models, 4):
        await engine.update_weights(publish(transfer, model, version), transfer)
        scored = await engine.score(asked, 1.0, deadline_seconds=PATIENCE)
        assert (scored.version, scored.checksum) == (version, engine.checksum)
        for one, got in zip(asked, scored.logprobs, strict=True):
            expected = reference_logprobs(model, list(one.prompt_ids), list(one.ids))
            assert got == pytest.approx(expected, abs=2e-4)
    # While weights change it is asked again, of the new ones.
    scoring = asyncio.ensure_future(engine.score(asked * 2, 1.0, deadline_seconds=PATIENCE))
    await asyncio.sleep(0.02)
    await engine.update_weights(publish(transfer, models[0], 6), transfer)
    scored = await scoring
    model = models[0] if scored.version == 6 else models[1]
    for one, got in zip(asked * 2, scored.logprobs, strict=True):
        expected = reference_logprobs(model, list(one.prompt_ids), list(one.ids))
        assert got == pytest.approx(expected, abs=2e-4)
    with pytest.raises(ScoreRefused, match=r"temperature = 0\.5"):
        await engine.score(asked, 0.5, deadline_seconds=PATIENCE)
    with pytest.raises(BadTurn):
        await engine.score([ScoreRequest((1,) * 300, (2,))], 1.0, deadline_seconds=PATIENCE)
    await engine.stop()


@pytest.mark.parametrize("updates", ["disk", "tensor"])
async def test_updates_under_load_lose_no_turn_and_no_version(
    served: Served, updates: UpdateSetting, transfer: Transfer
) -> None:
    if served.kind == "vllm" and updates == "tensor":
        pytest.skip("vLLM takes tensors from GPUs alone")
    # One core runs the double, its clients and their checks.
    rounds, crowd, longest = (50, 8, 120) if served.real else (3, 4, 60)
    models = [make_model(seed) for seed in range(3)]
    greedy_of = [greedy_tokens(model, PROMPT) for model in models]
    assert len({tuple(tokens) for tokens in greedy_of}) == 3
    engine = await served.engine(updates)
    await engine.update_weights(publish(transfer, models[0], 0), transfer)
    rng = random.Random(1)
    answers: list[tuple[list[int], EngineResponse]] = []
    ended = asyncio.Event()

    async def player(n: int) -> None:
        turn = 0
        while not ended.is_set():
            ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 30))]
            length = rng.randint(1, longest)
            answers.append((ids, await ask(engine, f"p{n}-{turn}", ids, max_new_tokens=length)))
            assert len(answers[-1][1].token_ids) == length
            turn += 1

    players = [asyncio.ensure_future(player(n)) for n in range(crowd)]
    exposed = []
    for version in range(1, rounds + 1):
        await asyncio.sleep(0.2)
        ref = publish(transfer, models[version % 3], version)
        exposed.append(await engine.update_weights(ref, transfer))
        assert engine.version == version
        greedy = await ask(engine, f"g{version}", PROMPT, temperature=0.0)
        assert [span.version for span in greedy.versions] == [version]
        assert greedy.token_ids == greedy_of[version % 3]
        expected = reference_logprobs(models[version % 3], PROMPT, greedy.token_ids)
        assert greedy.logprobs == pytest.approx(expected, abs=2e-4)
    ended.set()
    await asyncio.gather(*players)
    mixed = 0
    for ids, answer in answers:
        assert answer.finish_reason == "length"
        assert answer.versions[-1].end == len(answer.token_ids) == len(answer.logprobs)
        mixed += len(answer.versions) > 1
        for span in answer.versions:
            expected = reference_logprobs(models[span.version % 3], ids, answer.token_ids)
            got = answer.logprobs[span.start : span.end]
            assert got == pytest.approx(expected[span.start : span.end], abs=5e-4)
    assert len(answers) > rounds
    assert mixed > 0
    print(
        f"{updates}: {rounds} updates, {len(answers)} turns, {mixed} across an update, "
        f"exposed {1000 * sum(exposed) / rounds:.0f} ms mean, {1000 * max(exposed):.0f} ms worst"
    )
    await engine.stop()


async def test_an_aborted_turn_returns_what_there_is(served: Served, transfer: Transfer) -> None:
    engine = await served.engine()
    await engine.update_weights(publish(transfer, make_model(0), 0), transfer)
    task = asyncio.ensure_future(ask(engine, "r", [1], max_new_tokens=240))
    while not task.done():  # the first may come before the server has heard of the turn
        await asyncio.sleep(0.02)
        await engine.abort("r")
    answer = await task
    assert len(answer.token_ids) == len(answer.logprobs) <= 240
    assert answer.finish_reason == ("abort" if len(answer.token_ids) < 240 else "length")
    assert engine.load().running == 0
    await engine.stop()


async def test_turns_are_drawn_by_their_own_policys_adapter_and_end_by_it(
    served: Served, transfer: Transfer
) -> None:
    team = served.team(transfer)
    await team.begin()
    versions = dict.fromkeys((*RANKS, BASE), 0)
    await team.check(versions, "first")
    long = asyncio.create_task(ask(team.engines["solver"], "long", PROMPT, max_new_tokens=200))
    await until(lambda: team.engines["solver"].load().running > 0)
    # Nothing is paused for an adapter.
    assert await team.update("solver", 1) == 0.0
    await team.check({**versions, "solver": 1}, "second")
    answer = await long
    assert [(span.version, span.end) for span in answer.versions] == [(0, 200)]
    assert team.off("solver", PROMPT, answer) < 5e-4
    await team.stop()


async def test_a_request_ends_by_an_adapter_that_is_unloaded_meanwhile_and_new_ones_are_refused(
    served: Served, transfer: Transfer
) -> None:
    """What keeps tokens of a lost adapter right until the loss is found."""
    team = served.team(transfer)
    await team.begin()
    solver = team.engines["solver"]
    (name,) = solver._versions.names
    api = solver._server.api
    running = asyncio.create_task(ask(solver, "running", PROMPT, max_new_tokens=240))
    await until(lambda: solver.load().running > 0)
    # It has reached the server by then.
    await ask(solver, "sentinel", PROMPT, max_new_tokens=1)
    unloading = asyncio.create_task(api.unload_adapter(name))
    answer = await running
    await unloading
    assert [(span.version, span.end) for span in answer.versions] == [(0, 240)]
    assert team.off("solver", PROMPT, answer) < 5e-4
    with pytest.raises(EngineStale):
        await ask(solver, "refused", PROMPT)
    assert f"lost adapter '{name}'" in solver.message
    await team.update("solver", 0)
    await team.check(dict.fromkeys((*RANKS, BASE), 0), "again")
    await team.stop()
