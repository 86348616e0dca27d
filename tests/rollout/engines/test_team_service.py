"""A rollout service whose policies share servers: real ones, and their deaths under load."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.rollout.serving import supervision
from tests.rollout.engines import real_server, real_vllm
from tests.rollout.engines.models import publish_tensors, reference_logprobs
from tests.rollout.engines.trained_adapters import LAYERS, TrainedAdapter
from tests.rollout.house import CONFIG, House, make_spec, model_path, open_house
from tests.support.fake_sglang import FakeSglang, serve
from tests.support.waiting import PATIENCE, until
from troupe.rpc import TroupeError
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

ROLES = {"planner": 4, "solver": 2, "checker": 4}
BASE = "judge"
HEALTHY = common_pb.ENGINE_STATE_HEALTHY
# vLLM's kernels for CPUs have no heads of 8.
CHANGES: dict[str, Any] = {"hidden_size": 64, "head_dim": 32}
MODEL: dict[str, Any] = {**CONFIG, **CHANGES}


def make_model(config: dict[str, Any]) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return model.eval()


@dataclass
class Team:
    """A prepared job of three roles and a judge, which is their base."""

    house: House
    roles: dict[str, TrainedAdapter]
    names: Iterator[int] = field(default_factory=itertools.count)
    # Seeds of the adapters, by policy and version.
    seeds: dict[tuple[str, int], int] = field(default_factory=dict)
    turns: list[tuple[str, list[int], rollout_pb.GenerateResponse]] = field(default_factory=list)
    # Seconds that a turn or an update may take, with a restart of the server in between.
    patience: float = PATIENCE

    def publish(self, policy: str, version: int) -> common_pb.WeightsRef:
        transfer, job = self.house.transfer, self.house.job_id
        if policy == BASE:
            base = dict(self.roles["solver"].base.named_parameters())
            return publish_tensors(transfer, base, version, policy, job)
        seed = self.seeds[policy, version] = 100 * version + list(ROLES).index(policy) + 1
        self.roles[policy].step(seed)
        return self.roles[policy].publish(transfer, version, policy, job=job)

    async def prepare(self, engine: dict[str, Any]) -> None:
        """PrepareJob with all policies at version 0."""
        spec = make_spec("one_turn")
        model = {"path": model_path(**CHANGES), "dtype": "float32"}
        plain = {"model": model, "engine": {"max_context": 256, "max_running": 8, **engine}}
        spec["policies"] = {
            name: {**plain, "lora": {"rank": rank, "alpha": 2 * rank}}
            for name, rank in ROLES.items()
        }
        spec["policies"][BASE] = {**plain, "trainable": False}
        sampling = {"max_new_tokens": 8}
        spec["agents"] = {n: {"policy": n, "sampling": sampling} for n in spec["policies"]}
        spec["limits"] = {"turn_seconds": self.patience, "trajectory_seconds": self.patience}
        # deadline: a real server may need minutes on a busy machine
        await self.house.prepare_raw(spec, self.publish, seconds=3 * self.patience)

    async def ask(self, policy: str, tokens: int = 12) -> rollout_pb.GenerateResponse:
        """A turn, which is remembered."""
        number = next(self.names)
        prompt = [3 + (7 * number + k) % 100 for k in range(4 + number % 9)]
        sampling = common_pb.SamplingParams(temperature=1.0, max_new_tokens=tokens)
        request = rollout_pb.GenerateRequest(
            request_id=f"r{number}",
            job_id=self.house.job_id,
            policy=policy,
            input_ids=prompt,
            sampling=sampling,
        )
        answer = await self.house.rollout.Generate(request, timeout=self.patience)
        self.turns.append((policy, prompt, answer))
        return answer

    def check_turns(self) -> None:
        """Every token of every turn has the log-prob of the version that it names."""
        for policy, prompt, answer in self.turns:
            ids, got = list(answer.output_ids), list(answer.logprobs)
            assert ids
            assert len(ids) == len(got)
            assert answer.versions[-1].end == len(ids)
            for span in answer.versions:
                if policy == BASE:
                    wanted = reference_logprobs(self.roles["solver"].base, prompt, ids)
                else:
                    self.roles[policy].step(self.seeds[policy, span.version])
                    wanted = self.roles[policy].logprobs(prompt, ids)
                part = slice(span.start, span.end)
                assert got[part] == pytest.approx(wanted[part], abs=5e-4), (policy, span.version)

    async def statuses(self) -> dict[str, rollout_pb.EngineStatus]:
        """The engine of each policy."""
        request = rollout_pb.ListEnginesRequest(job_id=self.house.job_id)
        listed = await self.house.rollout.ListEngines(request, timeout=PATIENCE)
        return {status.policy: status for status in listed.engines}


@asynccontextmanager
async def team(place: Path) -> AsyncIterator[Team]:
    base = make_model(MODEL)
    roles = {name: TrainedAdapter(1, rank=rank, base=base) for name, rank in ROLES.items()}
    async with open_house(place) as house:
        yield Team(house, roles)


@pytest.fixture
def python(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The interpreter of a real server of the kind that the test asks for."""
    kind = request.getfixturevalue("kind")
    return {"sglang": real_server, "vllm": real_vllm}[kind].interpreter(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_three_roles_and_their_base_share_one_real_server(
    kind: str, python: str, tmp_path: Path
) -> None:
    launch = ["--lora-backend", "torch_native"] if kind == "sglang" else []
    engine = {
        "kind": kind,
        "python": python,
        "launch": launch,
        "start_timeout_seconds": 500,
    }
    async with team(tmp_path) as one:
        await one.prepare(engine)
        found = await one.statuses()
        assert {status.state for status in found.values()} == {HEALTHY}
        (host,) = {status.host for status in found.values()}
        assert host == f"{one.house.job_id}.planner.0@w0"
        for policy in (*ROLES, BASE) * 2:
            answer = await one.ask(policy)
            assert {span.version for span in answer.versions} == {0}
        # Roles move on one by one under load; no turn is lost, or drawn by another role's adapter.
        ended = asyncio.Event()

        async def play(policy: str) -> None:
            while not ended.is_set():
                await one.ask(policy, tokens=40)

        players = [asyncio.create_task(play(policy)) for policy in (*ROLES, BASE)]
        for version in range(1, 4):
            await asyncio.gather(
                *(one.house.update(one.publish(policy, version)) for policy in list(ROLES)[:2])
            )
        ended.set()
        await asyncio.gather(*players)
        for policy in list(ROLES)[:2]:
            answer = await one.ask(policy)
            assert {span.version for span in answer.versions} == {3}
        one.check_turns()
        assert {policy for policy, _, _ in one.turns} == {*ROLES, BASE}


async def endure(
    one: Team, deaths: int, kill: Callable[[], Awaitable[None]], rng: random.Random
) -> None:
    """Kill the server so often, each time while two roles update and all have turns."""
    ended = asyncio.Event()
    asked = 0

    async def play(policy: str) -> None:
        nonlocal asked
        while not ended.is_set():
            asked += 1
            await one.ask(policy, tokens=rng.randint(1, 60))

    async def update(policy: str, version: int) -> None:
        ref = one.publish(policy, version)
        async with asyncio.timeout(one.patience):
            while True:  # as the orchestrator, which repeats what failed
                try:
                    await one.house.update(ref)
                except TroupeError:
                    await asyncio.sleep(0.05)
                    continue
                return

    async def serves(version: int, before: dict[str, int]) -> bool:
        """Whether every engine is back. One that has not noticed its server's death yet may look
        as good: `before` has the restarts until then."""
        found = await one.statuses()
        expected = {**dict.fromkeys((*ROLES, BASE), 0), "planner": version, "solver": version}
        return all(
            (found[name].state, found[name].version) == (HEALTHY, number)
            and found[name].restarts > before[name]
            for name, number in expected.items()
        )

    players = [asyncio.create_task(play(policy)) for policy in (*ROLES, BASE) * 2]
    for version in range(1, deaths + 1):
        updates = [asyncio.create_task(update(name, version)) for name in ("planner", "solver")]
        await asyncio.sleep(rng.random() * 0.2)
        before = {name: status.restarts for name, status in (await one.statuses()).items()}
        await kill()
        await asyncio.gather(*updates)
        async with asyncio.timeout(one.patience):
            while not await serves(version, before):  # noqa: ASYNC110 - a service's
                await asyncio.sleep(0.05)
    ended.set()
    await asyncio.gather(*players)
    assert len(one.turns) == asked  # nothing was lost, nothing came twice
    one.check_turns()
    found = await one.statuses()
    assert {status.restarts for status in found.values()} <= {deaths, deaths + 1}


@pytest.fixture
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "RESTART_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(supervision, "RESTART_PAUSE_SECONDS_MAX", 0.2)


@pytest.mark.usefixtures("quick_restarts")
@pytest.mark.parametrize("deaths", [3, pytest.param(20, marks=pytest.mark.slow)])
async def test_deaths_of_a_shared_server_while_two_roles_update_lose_nothing(
    deaths: int, tmp_path: Path
) -> None:
    fake = FakeSglang(MODEL)
    fake.info |= {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": list(LAYERS)}
    rng = random.Random(4)

    async def kill() -> None:
        await fake.server.crash()
        fake.forget()
        await asyncio.sleep(rng.random() * 0.05)
        await fake.server.start()

    async with serve(fake) as url, team(tmp_path) as one:
        await one.prepare({"kind": "sglang", "urls": [url], "start_timeout_seconds": PATIENCE})
        await endure(one, deaths, kill, rng)
        await until(lambda: len(fake.adapters) == len(ROLES))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("quick_restarts")
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_kills_of_a_real_shared_server_while_two_roles_update_lose_nothing(
    kind: str, python: str, tmp_path: Path
) -> None:
    """`TROUPE_KILLS` says how often; a launch takes half a minute on an idle machine."""
    deaths = int(os.environ.get("TROUPE_KILLS", "3"))
    children = psutil.Process().children

    async def kill() -> None:
        # The process of the tests also has a Redis as a child.
        (server,) = [one for one in children() if kind in " ".join(one.cmdline())]
        os.killpg(server.pid, signal.SIGKILL)

    async with team(tmp_path) as one:
        one.patience = 2400  # deadline: a restart takes minutes on a busy machine
        await one.prepare(
            {
                "kind": kind,
                "python": python,
                "launch": ["--lora-backend", "torch_native"] if kind == "sglang" else [],
                "start_timeout_seconds": 1200,
            }
        )
        await endure(one, deaths, kill, random.Random(4))


async def test_a_forgotten_adapter_costs_its_turns_time_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "RESTART_PAUSE_SECONDS", 0.05)
    fake = FakeSglang(MODEL)
    fake.info |= {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": list(LAYERS)}
    async with serve(fake) as url, team(tmp_path) as one:
        await one.prepare({"kind": "sglang", "urls": [url], "start_timeout_seconds": PATIENCE})
        others = [asyncio.create_task(one.ask(name, tokens=200)) for name in (*ROLES, BASE)]
        await until(lambda: bool(fake.calls))
        (name,) = [name for name in fake.adapters if name.startswith("solver@")]
        del fake.adapters[name]
        answer = await one.ask("solver")
        assert {span.version for span in answer.versions} == {0}
        await asyncio.gather(*others)
        one.check_turns()
        # Also the role's running turn, which ends with the adapter or is asked for again.
        assert sum(policy == "solver" for policy, _, _ in one.turns) == 2
        assert {status.restarts for status in (await one.statuses()).values()} == {0}
