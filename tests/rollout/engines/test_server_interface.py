"""The engine of servers with a server that has no more than `InferenceServer` asks for: a further
kind of server needs nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from services.rollout.engines.errors import EngineStartFailed, Refused, ScoreRefused, UpdateFailed
from services.rollout.engines.requests import ScoreRequest
from services.rollout.engines.servers.engine import ServerEngine
from services.rollout.engines.servers.interface import (
    AdapterNeeds,
    InferenceServer,
    Launch,
    RunningTurns,
    ServerDescription,
    ServerLoad,
    ServerReply,
    Unfit,
)
from services.rollout.engines.turns import EngineTurn
from tests.rollout.engines.asking import ask
from tests.rollout.engines.models import (
    VOCABULARY,
    make_model,
    policy_spec,
    publish,
    reference_logprobs,
)
from tests.support.waiting import PATIENCE, until
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb


class PlainServer(InferenceServer):
    """A tiny model in this process that decodes greedily, loads directories, and aborts turns to
    load them."""

    product: ClassVar[str] = "Plain"
    oldest: ClassVar[str] = "1.0"
    options: ClassVar[dict[Any, str]] = {"memory": "--sleeps", "deterministic": "--greedy"}
    name_option: ClassVar[str] = "--name"
    running: ClassVar[list[PlainServer]] = []
    described: ClassVar[ServerDescription | Unfit] = ServerDescription(
        frozenset({"directory"}), model_type="qwen3", vocabulary=VOCABULARY, deterministic=True
    )

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.model = make_model(99)
        self.named: str | None = None
        self.keeps_old_weights = False
        self.going = asyncio.Event()
        self.going.set()
        self.turns: set[str] = set()
        # Until the next pause, turns stop after five tokens.
        self.holds = False
        self.running.append(self)

    @classmethod
    def command(cls, launch: Launch) -> list[str]:
        return ["plain", launch.source, *launch.extra_arguments]

    @classmethod
    def adapter_arguments(cls, needs: AdapterNeeds) -> list[str]:
        return ["--adapters", *needs.modules]

    async def close(self) -> None:
        self.turns.clear()

    async def describe(self) -> ServerDescription:
        if isinstance(self.described, Unfit):
            raise self.described
        return self.described

    async def alive(self) -> bool:
        return True

    async def healthy(self) -> bool:
        return self.going.is_set()

    async def probe(self) -> bool:
        return True

    async def load(self) -> ServerLoad:
        return ServerLoad(running=len(self.turns))

    async def generate(
        self,
        turn: EngineTurn,
        *,
        adapter: str | None = None,
        routing: object = None,
        cache_key: str | None = None,
    ) -> ServerReply:
        await self.going.wait()
        ids = [*turn.prompt_ids, *turn.token_ids]
        start, end = len(ids), len(ids) + turn.remaining
        self.turns.add(turn.key)
        while len(ids) < end and turn.key in self.turns:
            await asyncio.sleep(0)
            if self.holds and len(ids) == start + 5:
                continue
            with torch.no_grad():
                ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        aborted = turn.key not in self.turns
        self.turns.discard(turn.key)
        drawn = ids[start:]
        logprobs = reference_logprobs(self.model, ids[:start], drawn) if drawn else []
        return ServerReply(drawn, logprobs, aborted, last_name=self.named)

    async def score(
        self,
        key: str,
        ids: Sequence[int],
        start: int,
        *,
        adapter: str | None = None,
        cache_key: str | None = None,
    ) -> list[float]:
        return reference_logprobs(self.model, list(ids[: start + 1]), list(ids[start + 1 :]))

    async def abort(self, key: str) -> None:
        self.turns.discard(key)

    async def pause(self, turns: RunningTurns) -> bool:
        self.going.clear()
        self.turns.clear()
        self.holds = False
        return False

    async def resume(self) -> None:
        self.going.set()

    async def flush_cache(self) -> None:
        if self.turns:
            raise Refused("flush", 400, "busy")

    async def version(self) -> str | None:
        return self.named

    async def set_version(self, name: str) -> None:
        self.named = name

    async def load_directory(self, path: str, name: str, num_bytes: int, *, flush: bool) -> None:
        if not self.keeps_old_weights:
            tensors = await asyncio.to_thread(load_file, Path(path) / "model.safetensors")
            self.model.load_state_dict(tensors, strict=False)
        self.named = name


class PlainEngine(ServerEngine):
    """An engine that is a `PlainServer`."""

    kind: ClassVar[str] = "sglang"
    server_class: ClassVar[type[InferenceServer]] = PlainServer


@pytest.fixture
async def engine() -> AsyncIterator[PlainEngine]:
    PlainServer.running.clear()
    made = PlainEngine("e0", "solver", policy_spec(kind="sglang", urls=["http://plain:1"]))
    await made.start()
    yield made
    await made.stop()


async def test_a_further_server_serves_verified_versions_and_their_scores(
    engine: PlainEngine, transfer: Transfer
) -> None:
    for version in (0, 1):
        await engine.update_weights(publish(transfer, make_model(version), version), transfer)
        answer = await ask(engine, f"r{version}", [1, 2, 3], temperature=0.0)
        assert [span.version for span in answer.versions] == [version]
        wanted = reference_logprobs(make_model(version), [1, 2, 3], list(answer.token_ids))
        assert answer.logprobs == pytest.approx(wanted, abs=1e-5)
        scored = await engine.score([ScoreRequest((1, 2), (3,))], 1.0, deadline_seconds=PATIENCE)
        assert scored.version == version
        assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY
    assert engine.last_update is not None
    assert engine.last_update.way == "file"  # a tied tensor is published twice


async def test_a_turn_that_an_update_aborts_goes_on_with_the_new_version(
    engine: PlainEngine, transfer: Transfer
) -> None:
    (server,) = PlainServer.running
    await engine.update_weights(publish(transfer, make_model(0), 0), transfer)
    server.holds = True
    task = asyncio.ensure_future(ask(engine, "r", [1, 2, 3], max_new_tokens=60))
    await until(lambda: bool(server.turns))
    await engine.update_weights(publish(transfer, make_model(1), 1), transfer)
    answer = await task
    assert len(answer.token_ids) == 60
    assert answer.versions[-1].version == 1


async def test_a_server_that_keeps_its_old_weights_is_found(
    engine: PlainEngine, transfer: Transfer
) -> None:
    (server,) = PlainServer.running
    await engine.update_weights(publish(transfer, make_model(0), 0), transfer)
    server.keeps_old_weights = True
    with pytest.raises(UpdateFailed, match="prompt log-probs differ"):
        await engine.update_weights(publish(transfer, make_model(1), 1), transfer)
    assert engine.state == common_pb.ENGINE_STATE_STALE


async def test_messages_name_the_servers_product_and_options(
    engine: PlainEngine, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.update_weights(publish(transfer, make_model(0), 0), transfer)
    with pytest.raises(ScoreRefused, match="Plain reports"):
        await engine.score([ScoreRequest((1,), (2,))], 0.5, deadline_seconds=PATIENCE)
    monkeypatch.setattr(PlainServer, "described", Unfit("it has two heads", "Remove one."))
    other = PlainEngine("e1", "solver", policy_spec(kind="sglang", urls=["http://plain:2"]))
    with pytest.raises(EngineStartFailed, match="two heads") as info:
        await other.start()
    assert info.value.remedy == "Remove one."
    monkeypatch.setattr(PlainServer, "described", ServerDescription(frozenset({"directory"})))
    spec = policy_spec(kind="sglang", urls=["http://plain:3"], update="broadcast")
    with pytest.raises(EngineStartFailed, match="takes no weights in this way"):
        await PlainEngine("e2", "solver", spec).start()
