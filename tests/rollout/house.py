"""A rollout service in this event loop with two tiny policies, and the calls that tests make."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc.aio
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.chassis.app import serve
from services.rollout.engines.base import ServingEngine
from services.rollout.engines.factory import make_host
from services.rollout.engines.hosts import EngineHost
from services.rollout.job_setup import HostFactory
from services.rollout.server import RolloutService
from services.rollout.settings import RolloutSettings
from tests.support.waiting import PATIENCE
from tests.workflow.stage import make_tokenizer
from troupe.job import JobSpec
from troupe.rpc import connect, new_id
from troupe.states import TRAJECTORY, is_terminal
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import experience_store_pb2_grpc as store_grpc
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.v1 import rollout_pb2_grpc as rollout_grpc

NOBODY = "127.0.0.1:9"
PLAYS = "tests.rollout.plays"
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@cache
def tokenizer_path() -> str:
    """A directory with the character tokenizer, made once."""
    import tempfile

    path = tempfile.mkdtemp(prefix="troupe-test-tokenizer-")
    make_tokenizer().save_pretrained(path)
    return path


@cache
def model_path(**changes: Any) -> str:
    """A directory with the tiny model, made once: policies with random weights share no base."""
    import tempfile

    path = tempfile.mkdtemp(prefix="troupe-test-model-")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**{**CONFIG, **changes})
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@cache
def weights(seed: int) -> dict[str, torch.Tensor]:
    """Random weights of the tiny model."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    return dict(model.state_dict())


def make_spec(workflow: str = "team", **changes: Any) -> dict[str, Any]:
    """A job specification; `changes` are merged into it, section by section.

    Only plays of a team get a second policy with engines of its own: the tests are many.
    """
    pair = workflow in ("team", "branches")
    policy = {
        "model": {"config": CONFIG, "tokenizer": tokenizer_path()},
        "engine": {"max_context": 384, "max_running": 16},
    }
    spec: dict[str, Any] = {
        "name": "test",
        "workflow": f"{PLAYS}:{workflow}",
        "tasks": {"source": f"{PLAYS}:make_tasks"},
        "agents": {
            "solver": {"policy": "big", "sampling": {"max_new_tokens": 8}},
            "checker": {"policy": "small" if pair else "big", "sampling": {"max_new_tokens": 8}},
        },
        "policies": {"big": policy, "small": policy} if pair else {"big": policy},
        "pipeline": {"steps": 1, "queries_per_step": 2, "group_size": 2},
        "limits": {"turn_seconds": PATIENCE, "trajectory_seconds": PATIENCE},
    }
    return _merge(json.loads(json.dumps(spec)), changes)


def _merge(into: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value
    return into


@dataclass
class House:
    """The service under test, and its neighbours."""

    service: RolloutService
    address: str
    rollout: Any
    store: Any
    transfer: Transfer
    job_id: str = field(default_factory=lambda: new_id("job"))
    weight_refs: dict[str, common_pb.WeightsRef] = field(default_factory=dict)

    def publish(self, policy: str, version: int, seed: int | None = None) -> common_pb.WeightsRef:
        """Set weights of `version` and name them."""
        key = f"{self.job_id}/{policy}/weights@{version}"
        manifest = self.transfer.set(key, weights(version if seed is None else seed))
        return common_pb.WeightsRef(
            job_id=self.job_id,
            policy=policy,
            version=version,
            key=key,
            checksum=manifest.checksum,
            num_bytes=manifest.num_bytes,
        )

    async def prepare(
        self, workflow: str = "team", **changes: Any
    ) -> rollout_pb.PrepareJobResponse:
        """PrepareJob at version 0."""
        return await self.prepare_raw(make_spec(workflow, **changes))

    async def prepare_raw(
        self,
        spec: dict[str, Any],
        publish: Callable[[str, int], common_pb.WeightsRef] | None = None,
        seconds: float = PATIENCE,
    ) -> rollout_pb.PrepareJobResponse:
        """PrepareJob of a whole specification at version 0, which `publish` publishes."""
        publish = publish or self.publish
        refs = [publish(policy, 0) for policy in sorted(spec["policies"])]
        validated = JobSpec.model_validate(spec)
        request = rollout_pb.PrepareJobRequest(
            request_id=new_id("prepare"),
            job_id=self.job_id,
            spec_json=validated.model_dump_json(),
            weights=refs,
        )
        return await self.rollout.PrepareJob(request, timeout=seconds)  # type: ignore[no-any-return]

    async def open_step(
        self,
        queries: int = 2,
        group_size: int = 2,
        step: int = 0,
        required_columns: Sequence[str] = (),
        **how: Any,
    ) -> None:
        """Tables and a step in the store, as the orchestrator makes them."""
        await self.store.CreateTables(
            store_pb.CreateTablesRequest(
                request_id=new_id("tables"),
                job_id=self.job_id,
                policies=["big", "small"],
                required_columns=required_columns,
            )
        )
        await self.store.OpenStep(
            store_pb.OpenStepRequest(
                request_id=new_id("open"),
                job_id=self.job_id,
                step=step,
                versions={"big": 0, "small": 0},
                query_ids=[f"q{i}" for i in range(queries)],
                group_size=group_size,
                **how,
            )
        )

    def stream(self, tickets: Sequence[rollout_pb.Ticket], step: int = 0, **how: Any) -> Any:
        """RunQueries; the call."""
        request = rollout_pb.RunQueriesRequest(
            request_id=new_id("run"), job_id=self.job_id, step=step, tickets=tickets, **how
        )
        return self.rollout.RunQueries(request, timeout=PATIENCE)

    async def run(
        self, tickets: Sequence[rollout_pb.Ticket], step: int = 0
    ) -> dict[str, rollout_pb.TrajectoryEvent]:
        """RunQueries to its end: the last event of each trajectory."""
        ended = {}
        async for event in self.stream(tickets, step):
            if is_terminal(TRAJECTORY, event.state):
                assert event.trajectory_id not in ended
                ended[event.trajectory_id] = event
        return ended

    async def run_one(self, **ticket: Any) -> rollout_pb.TrajectoryEvent:
        """Evaluate one trajectory."""
        [event] = (await self.run(evaluation(1, **ticket))).values()
        return event

    async def update(self, ref: common_pb.WeightsRef) -> rollout_pb.UpdateWeightsResponse:
        """UpdateWeights."""
        request = rollout_pb.UpdateWeightsRequest(request_id=new_id("update"), weights=ref)
        return await self.rollout.UpdateWeights(request, timeout=PATIENCE)  # type: ignore[no-any-return]

    async def step(self, step: int = 0) -> store_pb.GetStepResponse:
        """Return the store's record of a step."""
        return await self.store.GetStep(  # type: ignore[no-any-return]
            store_pb.GetStepRequest(job_id=self.job_id, step=step)
        )

    async def samples(self, policy: str) -> list[store_pb.Sample]:
        """All rows of a policy."""
        page = await self.store.ListSamples(
            store_pb.ListSamplesRequest(job_id=self.job_id, policy=policy, page_size=1000)
        )
        return list(page.samples)


def training(queries: int = 2, group_size: int = 2, step: int = 0) -> list[rollout_pb.Ticket]:
    """Tickets of a step."""
    return [
        rollout_pb.Ticket(
            query_id=f"q{query}",
            trajectory_id=f"q{query}-s{step}-t{number}",
            split="train",
            index=query,
            seed=1000 * query + number,
            purpose=rollout_pb.Ticket.PURPOSE_TRAIN,
        )
        for query in range(queries)
        for number in range(group_size)
    ]


def evaluation(count: int = 1, index: int = 0, seed: int = 0) -> list[rollout_pb.Ticket]:
    """Tickets of an evaluation."""
    return [
        rollout_pb.Ticket(
            query_id=f"h{index + n}",
            trajectory_id=f"h{index + n}-e0-t0",
            split="held_out",
            index=index + n,
            seed=seed + n,
            purpose=rollout_pb.Ticket.PURPOSE_EVALUATE,
        )
        for n in range(count)
    ]


MakeEngine = Callable[..., ServingEngine]


def hosts_of(make: MakeEngine | None) -> HostFactory:
    """Makes hosts whose engines `make` makes."""
    if make is None:
        return make_host
    return lambda host_id, specs, **options: EngineHost(host_id, specs, make, **options)


@asynccontextmanager
async def open_house(
    directory: Path,
    *,
    store: str = NOBODY,
    reward: str = NOBODY,
    orchestrator: str = NOBODY,
    make: MakeEngine | None = None,
    blocked_seconds: float = 3.0,
) -> AsyncIterator[House]:
    """Serve rollout with neighbours at these addresses. `make`: makes engines instead of
    `services.rollout.engines`."""
    settings = RolloutSettings(
        transfer_dir=directory / "transfer",
        experience_store_address=store,
        reward_address=reward,
        orchestrator_address=orchestrator,
        drain_seconds=2,
        stream_drain_seconds=0.1,
        worker_id="w0",
        blocked_seconds=blocked_seconds,
    )
    for seed in (0, 1, 2, 99):
        weights(seed)  # not while an engine builds its model: transformers patches globals
    kept: list[RolloutService] = []

    def factory(bound: RolloutSettings, telemetry: Any) -> RolloutService:
        kept.append(RolloutService(bound, telemetry, make=hosts_of(make)))
        return kept[0]

    async with serve(factory, settings) as server, _channels(server.address, store) as channels:
        yield House(
            kept[0],
            server.address,
            rollout_grpc.RolloutStub(channels[0]),
            store_grpc.ExperienceStoreStub(channels[1]),
            Transfer(directory / "transfer"),
        )


@asynccontextmanager
async def _channels(*addresses: str) -> AsyncIterator[list[grpc.aio.Channel]]:
    channels = [connect(address) for address in addresses]
    try:
        yield channels
    finally:
        for channel in channels:
            await channel.close(None)
