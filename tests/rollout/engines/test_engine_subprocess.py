"""An engine whose model is computed by a process of its own: what it survives, and what ends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.rollout.engines.embedded import EmbeddedEngine
from services.rollout.engines.errors import EngineDied, EngineStartFailed
from services.rollout.engines.subprocess_batcher import batcher
from services.rollout.engines.subprocess_batcher.batcher import SubprocessBatcher
from services.rollout.engines.weights import skeleton
from tests.rollout.engines.asking import ask, prompt
from tests.rollout.engines.models import (
    CONFIG,
    make_model,
    policy_spec,
    publish,
    reference_logprobs,
)
from tests.support.processes import runs
from tests.support.waiting import PATIENCE, block_until, until
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb


def _process_of(engine: EmbeddedEngine) -> subprocess.Popen[bytes]:
    process = engine._batcher._process  # type: ignore[union-attr]
    assert process is not None
    return process


@pytest.fixture
async def apart(transfer: Transfer, model: PreTrainedModel) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine("e0", "solver", policy_spec(own_process=True))
    await engine.start()
    await engine.update_weights(publish(transfer, model, 0), transfer)
    yield engine
    await engine.stop()


@pytest.mark.parametrize("tied", [True, False])
def test_two_models_in_one_memory_have_the_same_weights(tied: bool) -> None:
    config = AutoConfig.for_model(**{**CONFIG, "tie_word_embeddings": tied})
    writer, reader = (skeleton(config, "float32", "solver") for _ in range(2))
    descriptor = batcher.allocate_weights(writer)
    try:
        for one in (writer, reader):
            batcher.map_weights(one, descriptor)
    finally:
        os.close(descriptor)
    expected = AutoModelForCausalLM.from_config(config).eval()
    writer.load_state_dict(expected.state_dict())
    ids = torch.tensor([[3, 1, 2]])
    with torch.no_grad():
        assert torch.equal(reader(ids).logits, expected(ids).logits)
    assert (reader.lm_head.weight is reader.model.embed_tokens.weight) == tied


def test_messages_keep_their_order_and_what_is_exact_stays_exact() -> None:
    ours, theirs = Pipe()
    box = batcher.Outbox(ours, lambda: None)
    values = [0.1, -1e-300, float("-inf"), float(torch.tensor(-4.6052).item())]
    for i in range(500):
        box.put("drew", i, values)
    box.close(PATIENCE)
    ours.close()
    heard: list[batcher.Message] = []
    while len(heard) < 500:
        heard += batcher.receive(theirs)
    assert heard == [["drew", i, values] for i in range(500)]


def test_who_sends_hears_that_nobody_listens() -> None:
    ours, theirs = Pipe()
    gone = threading.Event()
    box = batcher.Outbox(ours, gone.set)
    theirs.close()
    box.put("turn")
    assert gone.wait(PATIENCE)


@pytest.mark.slow
async def test_the_same_turns_are_drawn_in_the_process_and_apart(
    apart: EmbeddedEngine, transfer: Transfer, model: PreTrainedModel
) -> None:
    inside = EmbeddedEngine("e1", "solver", policy_spec())
    await inside.start()
    await inside.update_weights(publish(transfer, model, 0), transfer)
    rng = random.Random(5)
    prompts = [prompt(rng, 3, 40) for _ in range(40)]

    async def answers(engine: EmbeddedEngine) -> list[tuple[list[int], str, int]]:
        asked = (ask(engine, f"r{i}", p, seed=i, top_k=20) for i, p in enumerate(prompts))
        return [
            (a.token_ids, a.finish_reason, a.versions[0].version)
            for a in await asyncio.gather(*asked)
        ]

    assert await answers(apart) == await answers(inside)
    await inside.stop()


@pytest.mark.slow
async def test_a_killed_process_hands_its_turns_over_and_comes_back(
    apart: EmbeddedEngine, transfer: Transfer, model: PreTrainedModel
) -> None:
    first = prompt(random.Random(1), 3, 20)
    turn = asyncio.ensure_future(ask(apart, "r", first, max_new_tokens=200))
    await until(lambda: apart.load().generated_tokens >= 5)
    os.kill(_process_of(apart).pid, signal.SIGKILL)
    with pytest.raises(EngineDied) as lost:
        await turn
    drawn = lost.value.drawn
    assert drawn is not None
    assert len(drawn.token_ids) >= 5
    expected = reference_logprobs(model, first, drawn.token_ids)
    assert drawn.logprobs == pytest.approx(expected, abs=2e-4)
    assert apart.state == common_pb.ENGINE_STATE_DEAD
    await apart.start()
    assert apart.state == common_pb.ENGINE_STATE_STALE
    await apart.update_weights(publish(transfer, make_model(1), 1), transfer)
    assert (await ask(apart, "again", first)).versions[0].version == 1


@pytest.mark.slow
async def test_a_process_that_hangs_refuses_new_weights(
    apart: EmbeddedEngine, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.engines.subprocess_batcher.batcher.PASS_SECONDS", 0.3)
    process = _process_of(apart)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(EngineDied):
        await apart.update_weights(publish(transfer, make_model(1), 1), transfer)
    assert apart.state == common_pb.ENGINE_STATE_DEAD
    monkeypatch.undo()
    await apart.start()  # which ends the process that hangs
    assert process.returncode == -signal.SIGKILL
    assert _process_of(apart).pid != process.pid


@pytest.mark.slow
async def test_a_stopped_engine_leaves_no_process(apart: EmbeddedEngine) -> None:
    process = _process_of(apart)
    await apart.stop()
    assert process.returncode == 0


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Those of engines, as they are started."""
    started: list[subprocess.Popen[bytes]] = []

    class Process(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(
        "services.rollout.engines.subprocess_batcher.batcher.subprocess.Popen", Process
    )
    return started


@pytest.mark.parametrize("how", ["cancelled", "stopped"])
async def test_a_start_that_nobody_waits_for_leaves_no_process(
    how: str, processes: list[subprocess.Popen[bytes]]
) -> None:
    engine = EmbeddedEngine("e0", "solver", policy_spec(own_process=True))
    start = asyncio.create_task(engine.start())
    await until(lambda: bool(processes))
    if how == "stopped":
        await engine.stop()
        with pytest.raises((EngineDied, EngineStartFailed)):
            await start
    else:
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
    [process] = processes
    assert await asyncio.to_thread(process.wait, PATIENCE) == -signal.SIGKILL
    assert engine._batcher is None
    assert not engine._life.serves


async def test_a_batcher_that_was_stopped_before_it_started_ends_its_process(
    model: PreTrainedModel, processes: list[subprocess.Popen[bytes]]
) -> None:
    spec = policy_spec(own_process=True)
    batcher = SubprocessBatcher(
        model,
        source=spec.language_model,
        lora=None,
        policy="solver",
        max_running=2,
        max_context=64,
        threads=1,
        keep_cache=False,
        start_seconds=PATIENCE,
        drew=lambda count: None,
        exited=lambda reason: None,
    )
    batcher.stop(0.0)
    with pytest.raises(EngineStartFailed):
        await asyncio.to_thread(batcher.start)
    assert not batcher.alive
    assert processes[0].returncode == -signal.SIGKILL


@pytest.mark.slow
async def test_turns_that_come_together_are_sent_together(
    apart: EmbeddedEngine,
    transfer: Transfer,
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await apart.update_weights(publish(transfer, model, 0), transfer)
    sent: list[list[str]] = []
    send = batcher.send

    def told(connection: Connection, messages: list[batcher.Message]) -> None:
        sent.append([what for what, *_ in messages])
        send(connection, messages)

    monkeypatch.setattr(batcher, "send", told)
    asked = [asyncio.create_task(ask(apart, f"r{i}", [3, 4, 5 + i], seed=i)) for i in range(30)]
    await asyncio.sleep(0)
    asked[0].cancel()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert all(not isinstance(answer, BaseException) for answer in answers[1:])
    with_turns = [some for some in sent if "turn" in some]
    assert [some.count("turn") for some in with_turns] == [30]
    assert [some.count("cancel") for some in sent if "cancel" in some] == [1]


@pytest.mark.slow
async def test_a_process_that_is_not_ready_in_time_is_ended() -> None:
    engine = EmbeddedEngine(
        "e0", "solver", policy_spec(own_process=True, start_timeout_seconds=0.2)
    )
    with pytest.raises(EngineStartFailed, match="ready"):
        await engine.start()
    assert engine.state == common_pb.ENGINE_STATE_DEAD


_WORKER = """
import asyncio, sys
from services.rollout.engines.embedded import EmbeddedEngine
from tests.rollout.engines.models import policy_spec

async def main():
    engine = EmbeddedEngine("e0", "solver", policy_spec(own_process=True))
    await engine.start()
    print(engine._batcher._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_process_ends_with_a_worker_that_is_killed() -> None:
    worker = subprocess.Popen([sys.executable, "-c", _WORKER], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
    finally:
        worker.kill()
        worker.wait(PATIENCE)
    block_until(lambda: not runs(pid))
