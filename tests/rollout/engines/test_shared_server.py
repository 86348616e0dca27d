"""Engines of several policies on one server: one base, each turn by its own adapter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from services.rollout.engines.errors import (
    EngineStale,
    EngineStartFailed,
    UpdateFailed,
    WeightsRefused,
)
from services.rollout.engines.requests import ScoreRequest
from services.rollout.engines.servers import adapters
from services.rollout.engines.servers.host import ServerHost
from services.rollout.engines.sglang.engine import SglangEngine
from tests.rollout.engines.asking import ask
from tests.rollout.engines.models import CONFIG, publish_tensors, transfer_in
from tests.rollout.engines.teams import BASE, RANKS, Team, team_specs
from tests.rollout.engines.trained_adapters import LAYERS, TrainedAdapter
from tests.support.fake_sglang import FakeSglang, serve
from tests.support.waiting import PATIENCE, until
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb

HEALTHY = common_pb.ENGINE_STATE_HEALTHY
STALE = common_pb.ENGINE_STATE_STALE
DEAD = common_pb.ENGINE_STATE_DEAD
PROMPT = [5, 6, 7]
ALL = dict.fromkeys((*RANKS, BASE), 0)


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return transfer_in(tmp_path)


@pytest.fixture
async def fake() -> AsyncIterator[FakeSglang]:
    fake = FakeSglang(CONFIG)
    fake.info |= {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": list(LAYERS)}
    async with serve(fake):
        yield fake


def make_team(fake: FakeSglang, transfer: Transfer, **engine: object) -> Team:
    url = f"http://127.0.0.1:{fake.server.port}"
    specs = team_specs(kind="sglang", urls=[url], **engine)
    host = ServerHost("job.planner.0@w", specs, SglangEngine)
    return Team(
        host, transfer, {name: TrainedAdapter(1, rank=rank) for name, rank in RANKS.items()}
    )


@pytest.fixture
async def team(fake: FakeSglang, transfer: Transfer) -> AsyncIterator[Team]:
    made = make_team(fake, transfer)
    await made.begin()
    yield made
    await made.stop()


def loads_of_base(fake: FakeSglang) -> int:
    return fake.seen.count("/begin_weight_update") + fake.seen.count("/update_weights_from_disk")


def name_of(fake: FakeSglang, policy: str) -> str:
    (name,) = [name for name in fake.adapters if name.startswith(f"{policy}@")]
    return name


async def test_one_server_has_the_base_once_and_every_turn_is_its_policys_own(
    fake: FakeSglang, team: Team
) -> None:
    assert len(fake.adapters) == len(RANKS)
    loads, pauses = loads_of_base(fake), len(fake.modes)
    await team.check(ALL, "first")
    # A role moves on while others' turns, and its own, are under way: nothing is paused.
    long = {
        name: asyncio.create_task(
            ask(team.engines[name], f"long-{name}", PROMPT, max_new_tokens=60)
        )
        for name in team.engines
    }
    await until(lambda: len(fake.calls) == len(long))
    assert await team.update("solver", 1) == 0.0
    assert team.engines["solver"].live_versions == [0, 1]
    assert await team.update("checker", 1) == 0.0
    await team.check({**ALL, "solver": 1, "checker": 1}, "second")
    for name, task in long.items():
        answer = await task
        assert [(span.version, span.end) for span in answer.versions] == [(0, 60)]
        assert team.off(name, PROMPT, answer) < 2e-4
    # The last turn of a former version takes its adapter along.
    await until(lambda: team.engines["solver"].live_versions == [])
    assert len(fake.adapters) == len(RANKS)
    assert (loads_of_base(fake), len(fake.modes)) == (loads, pauses)


async def test_an_adapter_that_is_verified_while_turns_of_the_former_one_end_is_kept(
    fake: FakeSglang, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify, reached, go_on = adapters.prove, asyncio.Event(), asyncio.Event()

    async def held_up(*args: Any, **kwargs: Any) -> None:
        reached.set()
        await go_on.wait()
        await verify(*args, **kwargs)

    monkeypatch.setattr(adapters, "prove", held_up)
    update = asyncio.create_task(team.update("solver", 1))
    async with asyncio.timeout(PATIENCE):
        await reached.wait()
    unloads = fake.seen.count("/unload_lora_adapter")
    for number in range(3):
        await ask(team.engines["solver"], f"short-{number}", PROMPT)
    await team.engines["solver"]._versions.settled()
    assert fake.seen.count("/unload_lora_adapter") == unloads
    go_on.set()
    async with asyncio.timeout(PATIENCE):
        await update
    await team.check({**ALL, "solver": 1}, "after")
    assert len(fake.adapters) == len(RANKS)


async def test_engines_that_start_together_launch_one_server_and_load_one_base(
    fake: FakeSglang, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = make_team(fake, transfer)
    ups = []
    up = alone.host.server.up

    async def counted() -> None:
        ups.append(1)
        await up()

    monkeypatch.setattr(alone.host.server, "up", counted)
    await alone.begin()
    assert ups == [1]
    assert fake.modes == ["retract"]
    for engine in alone.engines.values():
        assert (engine.state, engine.version) == (HEALTHY, 0)
    await alone.stop()
    assert not fake.adapters  # an attached server goes on without them


async def test_a_death_ends_all_engines_and_a_restart_proves_base_and_adapters_anew(
    fake: FakeSglang, team: Team
) -> None:
    await team.update("solver", 1)
    turn = asyncio.create_task(ask(team.engines["planner"], "lost", PROMPT, max_new_tokens=200))
    await until(lambda: bool(fake.calls))
    await fake.server.crash()
    with pytest.raises(Exception, match="died"):
        await turn
    assert {engine.state for engine in team.engines.values()} == {DEAD}
    fake.forget()
    fake.bodies.clear()
    await fake.server.start()
    await asyncio.gather(*(engine.start() for engine in team.engines.values()))
    assert {engine.state for engine in team.engines.values()} == {STALE}
    versions = {**ALL, "solver": 1}
    await asyncio.gather(*(team.update(name, number) for name, number in versions.items()))
    # Each adapter has answered the prompt of its proof; and so has the base.
    proven = {body.get("lora_path") for body in fake.bodies if "logprob_start_len" in body}
    assert proven == {None, *fake.adapters}
    await team.check(versions, "again")
    assert {engine.restarts for engine in team.engines.values()} == {1}


async def test_a_base_that_differs_in_one_tensor_is_refused_by_name(
    fake: FakeSglang, team: Team, transfer: Transfer
) -> None:
    other = TrainedAdapter(3, rank=2)
    with torch.no_grad():
        dict(other.base.named_parameters())["model.layers.1.mlp.up_proj.weight"][0, 0] += 0.5
    with pytest.raises(WeightsRefused, match=r"'model.layers.1.mlp.up_proj.weight' differs") as no:
        await team.engines["solver"].update_weights(other.publish(transfer, 1, "solver"), transfer)
    assert no.value.field == "policies.solver.engine.share"
    whole = publish_tensors(transfer, dict(other.base.named_parameters()), 1, BASE)
    with pytest.raises(WeightsRefused, match=r"up_proj.weight"):
        await team.engines[BASE].update_weights(whole, transfer)
    await team.check(ALL, "still")


async def test_an_adapter_with_the_weights_of_another_never_serves(
    fake: FakeSglang, team: Team
) -> None:
    fake.mistaken = fake.adapters[name_of(fake, "planner")]["tensors"]
    with pytest.raises(UpdateFailed, match="prompt log-probs differ"):
        await team.update("checker", 1)
    assert team.engines["checker"].state == STALE
    fake.mistaken = None
    # The others have lost nothing.
    await team.check({name: 0 for name in ALL if name != "checker"}, "others")
    await team.update("checker", 1)
    await team.check({**ALL, "checker": 1}, "all")
    assert len(fake.adapters) == len(RANKS)


async def test_an_adapter_with_nan_is_refused_and_the_former_version_goes_on(
    fake: FakeSglang, team: Team, transfer: Transfer
) -> None:
    broken = team.roles["solver"]
    for name, parameter in broken.model.named_parameters():
        if name.endswith("layers.0.self_attn.q_proj.lora_B.default.weight"):
            parameter.data[0, 0] = float("nan")
    ref = broken.publish(transfer, 1, "solver")
    with pytest.raises(WeightsRefused, match=r"q_proj.lora_B.weight' has numbers that are not"):
        await team.engines["solver"].update_weights(ref, transfer)
    assert len(fake.adapters) == len(RANKS)
    await team.check(ALL, "still")


async def test_a_server_that_forgets_an_adapter_loses_no_turn_to_the_base(
    fake: FakeSglang, team: Team
) -> None:
    solver = team.engines["solver"]
    running = asyncio.create_task(ask(team.engines["planner"], "on", PROMPT, max_new_tokens=60))
    await until(lambda: bool(fake.calls))
    del fake.adapters[name_of(fake, "solver")]
    with pytest.raises(EngineStale):  # the router repeats it where the policy serves
        await ask(solver, "lost", PROMPT)
    assert solver.state == STALE
    assert "lost adapter 'solver@0" in solver.message
    loads = loads_of_base(fake)
    await team.update("solver", 0)
    await team.check(ALL, "again")
    assert loads_of_base(fake) == loads
    assert team.off("planner", PROMPT, await running) < 2e-4


async def test_turns_of_a_lost_adapter_end_at_once_and_keep_no_token(
    fake: FakeSglang, team: Team
) -> None:
    solver = team.engines["solver"]
    name = name_of(fake, "solver")
    kept = asyncio.create_task(ask(solver, "kept", PROMPT, max_new_tokens=200))
    await until(lambda: any(len(call.tokens) > 2 for call in fake.calls.values()))
    # The server returns it in a load of weights: its tokens are kept, the rest is asked for.
    team.host.updates += 1
    (call,) = fake.calls.values()
    call.aborted = True
    await until(lambda: len(solver._turns.get("kept").versions) > 2)  # type: ignore[union-attr]
    await until(lambda: bool(fake.calls))
    other = asyncio.create_task(ask(team.engines["planner"], "on", PROMPT, max_new_tokens=60))
    await until(lambda: len(fake.calls) == 2)
    # Somebody unloads it: SGLang takes no new turns for it, and loads nothing before the last ends.
    async with httpx.AsyncClient(base_url=solver.url, timeout=PATIENCE) as client:
        unloading = asyncio.create_task(
            client.post("/unload_lora_adapter", json={"lora_name": name})
        )
        await until(lambda: name not in fake.adapters)
        with pytest.raises(EngineStale):
            await ask(solver, "refused", PROMPT)
        with pytest.raises(EngineStale) as lost:
            await kept
        assert lost.value.drawn is not None
        assert lost.value.drawn.token_ids == []
        await team.update("solver", 0)
        assert (await unloading).status_code == 200
    await team.check(ALL, "again")
    assert team.off("planner", PROMPT, await other) < 2e-4


async def test_turns_of_an_adapter_that_a_server_computes_wrongly_are_not_taken(
    fake: FakeSglang, team: Team
) -> None:
    solver = team.engines["solver"]
    running = asyncio.create_task(ask(solver, "running", PROMPT, max_new_tokens=200))
    await until(lambda: bool(fake.calls))
    wrong = fake.adapters[name_of(fake, "solver")]
    other = fake.adapters[name_of(fake, "checker")]
    wrong.clear()
    wrong.update(other)
    # The next refusal, whatever its reason, has the adapter proved.
    fake.refuses = {"unlucky"}
    with pytest.raises(EngineStale):
        await ask(solver, "unlucky", PROMPT)
    with pytest.raises(EngineStale):
        await running
    assert solver.state == STALE
    assert not any(name.startswith("solver@") for name in fake.adapters)
    await team.update("solver", 0)
    await team.check(ALL, "again")


async def test_a_server_that_restarted_unnoticed_serves_only_after_all_policies_have_loaded(
    fake: FakeSglang, team: Team
) -> None:
    fake.forget()
    with pytest.raises(EngineStale):
        await ask(team.engines[BASE], "base", PROMPT)  # the base has no name to be refused by
    assert {engine.state for engine in team.engines.values()} == {STALE}
    await asyncio.gather(*(team.update(name, 0) for name in ALL))
    await team.check(ALL, "again")
    fake.forget()
    with pytest.raises(EngineStale):
        await ask(team.engines["solver"], "adapter", PROMPT)
    assert {engine.state for engine in team.engines.values()} == {STALE}
    await asyncio.gather(*(team.update(name, 0) for name in ALL))
    await team.check(ALL, "and again")
    fake.forget()
    asked = [ScoreRequest((5, 6), (7, 8))]
    with pytest.raises(EngineStale):
        await team.engines[BASE].score(asked, 1.0, deadline_seconds=PATIENCE)
    await asyncio.gather(*(team.update(name, 0) for name in ALL))
    scored = await team.engines[BASE].score(asked, 1.0, deadline_seconds=PATIENCE)
    wanted = team.logprobs(BASE, 0, [5, 6], [7, 8])
    assert scored.logprobs[0] == pytest.approx(wanted, abs=2e-4)


async def test_a_version_waits_for_a_slot_and_says_so_while_turns_of_old_ones_go_on(
    fake: FakeSglang, transfer: Transfer
) -> None:
    fake.info["max_loras_per_batch"] = len(RANKS) + 2  # one more than one each, and the base
    team = make_team(fake, transfer)
    await team.begin()
    solver, planner = team.engines["solver"], team.engines["planner"]
    old = asyncio.create_task(ask(solver, "old", PROMPT, max_new_tokens=200))
    await until(lambda: bool(fake.calls))
    await team.update("solver", 1)
    updating = asyncio.create_task(team.update("planner", 1))
    await until(lambda: "slots" in planner.message)
    assert "version 1 waits: all 4 slots for adapters have turns" in planner.message
    assert "solver@0" in planner.message
    # Meanwhile everybody serves.
    await team.check({**ALL, "solver": 1}, "meanwhile")
    assert not updating.done()
    assert not old.done()
    answer = await old
    await updating
    assert [(span.version, span.end) for span in answer.versions] == [(0, 200)]
    assert team.off("solver", PROMPT, answer) < 2e-4
    await team.check({**ALL, "solver": 1, "planner": 1}, "all")
    await team.stop()


async def test_a_slot_that_never_comes_fails_the_update_and_a_lost_server_ends_the_wait(
    fake: FakeSglang, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.info["max_loras_per_batch"] = len(RANKS) + 2
    team = make_team(fake, transfer)
    await team.begin()
    old = asyncio.create_task(ask(team.engines["solver"], "old", PROMPT, max_new_tokens=240))
    await until(lambda: bool(fake.calls))
    await team.update("solver", 1)
    with monkeypatch.context() as short:
        short.setattr(adapters, "SLOT_SECONDS", 0.05)
        with pytest.raises(UpdateFailed, match="no slot for its adapter within"):
            await team.update("planner", 1)
    assert not old.done()
    waiting = asyncio.create_task(team.update("checker", 1))
    await until(lambda: "slots" in team.engines["checker"].message)
    await fake.server.crash()
    with pytest.raises(UpdateFailed):
        await waiting
    with pytest.raises(Exception, match="died"):
        await old
    assert team.engines["checker"].state == DEAD
    await team.stop()


@pytest.mark.parametrize(
    ("info", "field", "message", "remedy"),
    [
        ({"max_lora_rank": 3}, "planner", "up to rank 3, the policy's have 4", "--max-lora-rank 4"),
        ({"lora_target_modules": ["q_proj"]}, "planner", "it adapts no down_proj", "up_proj"),
        ({"max_loras_per_batch": 4}, "planner", "holds 3 adapters, 3 policies", "per-batch 10"),
        ({"max_loaded_loras": 2}, "planner", "holds 2 adapters", "--max-loaded-loras"),
    ],
)
async def test_an_attached_server_for_fewer_or_smaller_adapters_is_refused(
    fake: FakeSglang,
    transfer: Transfer,
    info: dict[str, Any],
    field: str,
    message: str,
    remedy: str,
) -> None:
    fake.info |= info
    team = make_team(fake, transfer)
    results = await asyncio.gather(
        *(engine.start() for engine in team.engines.values()), return_exceptions=True
    )
    for error in results:
        assert isinstance(error, EngineStartFailed)
        assert message in str(error)
        assert remedy in (error.remedy or "")
        assert error.field == f"policies.{field}.engine.urls"
    await team.stop()


async def test_a_server_sleeps_when_all_have_and_wakes_with_the_first(
    fake: FakeSglang, transfer: Transfer
) -> None:
    fake.info["enable_memory_saver"] = True
    team = make_team(fake, transfer)
    await team.begin()
    *others, last = team.engines.values()
    for engine in others:
        await engine.sleep()
        assert not fake.released
    await team.check({BASE: 0}, "awake")
    await last.sleep()
    assert fake.released
    first = others[0]
    await first.wake()
    assert not fake.released
    loads = loads_of_base(fake)
    await team.update("planner", 1)
    assert loads_of_base(fake) > loads  # what its memory held is undefined
    await team.check({"planner": 1}, "first")
    loads = loads_of_base(fake)
    for engine in (*others[1:], last):
        await engine.wake()
        await team.update(engine.policy, 0)
    assert loads_of_base(fake) == loads
    await team.check({**ALL, "planner": 1}, "all")
    await team.stop()


async def test_one_probe_answers_all_engines(fake: FakeSglang, team: Team) -> None:
    fake.seen.clear()
    for _ in range(2):
        states = await asyncio.gather(*(engine.check() for engine in team.engines.values()))
        assert set(states) == {HEALTHY}
    assert fake.seen.count("/health_generate") <= 3
    fake.faults.unhealthy = True
    for _ in range(3):
        await asyncio.gather(*(engine.check() for engine in team.engines.values()))
    assert {engine.state for engine in team.engines.values()} == {DEAD}
