"""The SGLang engine when things go wrong, against the test double."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from services.rollout.engines.errors import (
    BadTurn,
    EngineDied,
    EngineStale,
    EngineStartFailed,
    NonFiniteLogits,
    PromptTooLong,
    ReplyBroken,
    TurnDeadline,
    UpdateFailed,
    WeightsRefused,
)
from services.rollout.engines.factory import make_engine
from services.rollout.engines.requests import EngineResponse
from services.rollout.engines.servers.interface import Launch
from services.rollout.engines.sglang import server
from services.rollout.engines.sglang.engine import SglangEngine
from tests.rollout.engines.models import (
    CONFIG,
    VOCABULARY,
    make_model,
    policy_spec,
    publish,
    reference_logprobs,
    transfer_in,
)
from tests.rollout.engines.real_server import interpreter
from tests.support.fake_sglang import FakeSglang, serve
from tests.support.interpreters import SGLANG, environment
from tests.support.waiting import PATIENCE, until
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling


@dataclass
class Stage:
    """A double, an engine attached to it that serves version 0, and its transfer."""

    fake: FakeSglang
    engine: SglangEngine
    transfer: Transfer

    async def ask(
        self, name: str, ids: list[int], seconds: float = PATIENCE, **sampling: object
    ) -> EngineResponse:
        params = Sampling(**{"max_new_tokens": 8, **sampling})  # type: ignore[arg-type]
        return await self.engine.generate(name, ids, params, deadline_seconds=seconds)

    async def update(self, seed: int, version: int) -> float:
        ref = publish(self.transfer, make_model(seed), version)
        return await self.engine.update_weights(ref, self.transfer)


async def attach(fake: FakeSglang, url: str, directory: Path) -> Stage:
    engine = make_engine("e0", "solver", policy_spec(kind="sglang", urls=[url]))
    assert isinstance(engine, SglangEngine)
    await engine.start()
    return Stage(fake, engine, transfer_in(directory))


def drawing(fake: FakeSglang) -> int:
    """How many turns have a token and run on."""
    return sum(bool(call.tokens) for call in fake.calls.values())


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    fake = FakeSglang(CONFIG)
    async with serve(fake) as url:
        stage = await attach(fake, url, tmp_path)
        await stage.update(0, 0)
        yield stage
        await stage.engine.stop()


async def test_a_server_that_batches_as_it_likes_serves_no_deterministic_job(
    tmp_path: Path,
) -> None:
    fake = FakeSglang(CONFIG)
    async with serve(fake) as url:
        spec = policy_spec(kind="sglang", urls=[url])
        engine = make_engine("e0", "solver", spec, deterministic=True)
        with pytest.raises(EngineStartFailed, match="deterministic inference") as refused:
            await engine.start()
        assert refused.value.field == "policies.solver.engine.urls"
        assert "--enable-deterministic-inference" in (refused.value.remedy or "")
        fake.info["enable_deterministic_inference"] = True
        await engine.start()
        assert engine.state == common_pb.ENGINE_STATE_STALE
        await engine.stop()


def test_a_server_of_a_deterministic_job_is_launched_so() -> None:
    spec = policy_spec(kind="sglang")
    assert server.DETERMINISTIC not in server.SglangServer.command(Launch(spec, "m", 1, 64))
    assert server.DETERMINISTIC in server.SglangServer.command(
        Launch(spec, "m", 1, 64, deterministic=True)
    )


async def test_the_safe_order_of_an_update(stage: Stage) -> None:
    stage.fake.seen.clear()
    await stage.update(1, 1)
    control = [path for path in stage.fake.seen if path != "/weights_checker"]
    assert control == [
        "/pause_generation",
        "/update_weights_from_disk",  # and flush
        "/update_weight_version",
        "/continue_generation",
        "/model_info",
        "/generate",
    ]
    assert await stage.update(1, 1) == 0.0
    with pytest.raises(WeightsRefused, match="new version"):
        await stage.update(2, 1)


async def test_a_server_that_keeps_its_old_weights_is_found_out(stage: Stage) -> None:
    stage.fake.faults.ignore_weights = True
    running = asyncio.ensure_future(stage.ask("r", [1], max_new_tokens=200))
    await until(lambda: drawing(stage.fake) == 1)
    with pytest.raises(UpdateFailed, match="log-probs differ"):
        await stage.update(1, 1)
    assert (stage.engine.state, stage.engine.version) == (common_pb.ENGINE_STATE_STALE, None)
    with pytest.raises(EngineStale):
        await running
    with pytest.raises(EngineStale):
        await stage.ask("later", [1])
    stage.fake.faults.ignore_weights = False
    await stage.update(1, 1)
    assert (await stage.ask("again", [1])).versions[0].version == 1


async def test_a_moved_server_that_keeps_its_old_weights_is_detected(
    stage: Stage,
) -> None:
    """Also where the two versions have one number."""
    stage.fake.has_cuda = stage.fake.faults.ignore_weights = True
    ref = publish(stage.transfer, make_model(1), 0, policy="checker")
    await stage.engine.drain("moves", deadline_seconds=1)
    stage.engine.assign("checker")
    with pytest.raises(UpdateFailed, match="its weights did not change"):
        await stage.engine.update_weights(ref, stage.transfer)
    assert stage.engine.state == common_pb.ENGINE_STATE_STALE
    stage.fake.faults.ignore_weights = False
    await stage.engine.update_weights(ref, stage.transfer)
    assert (stage.engine.state, stage.engine.checksum) == (
        common_pb.ENGINE_STATE_HEALTHY,
        ref.checksum,
    )


async def test_a_refused_update_leaves_the_server_generating_and_stale(stage: Stage) -> None:
    stage.fake.faults.refuse_update = True
    with pytest.raises(UpdateFailed, match="Failed to get weights"):
        await stage.update(1, 1)
    assert stage.engine.state == common_pb.ENGINE_STATE_STALE
    assert not stage.fake.paused


async def test_weights_that_do_not_fit_never_reach_the_server(stage: Stage) -> None:
    state = make_model(1).state_dict()
    state["model.norm.weight"] = torch.zeros(7)
    checksum = stage.transfer.set("job/solver/weights@1", state).checksum
    ref = common_pb.WeightsRef(version=1, key="job/solver/weights@1", checksum=checksum)
    stage.fake.seen.clear()
    with pytest.raises(WeightsRefused, match="the model wants"):
        await stage.engine.update_weights(ref, stage.transfer)
    assert stage.fake.seen == []
    assert (stage.engine.state, stage.engine.version) == (common_pb.ENGINE_STATE_HEALTHY, 0)


async def test_bad_turns_never_reach_the_server(stage: Stage) -> None:
    stage.fake.seen.clear()
    with pytest.raises(PromptTooLong):
        await stage.ask("r", [1] * 256)
    with pytest.raises(BadTurn, match="vocabulary"):
        await stage.ask("r", [VOCABULARY])
    assert stage.fake.seen == []


async def test_a_reply_that_is_cut_fails_its_turn_only(stage: Stage) -> None:
    stage.fake.faults.cut_reply = True
    with pytest.raises(ReplyBroken, match="JSON"):
        await stage.ask("r", [1])
    stage.fake.faults.cut_reply = False
    assert len((await stage.ask("r", [1])).token_ids) == 8
    assert stage.engine.state == common_pb.ENGINE_STATE_HEALTHY


async def test_weights_that_compute_nan_are_named(stage: Stage) -> None:
    stage.fake.faults.not_finite = True
    with pytest.raises(NonFiniteLogits):
        await stage.ask("r", [1])


async def test_an_abort_by_the_server_breaks_the_reply(stage: Stage) -> None:
    stage.fake.faults.abort_everything = True
    with pytest.raises(ReplyBroken, match="the server aborted it: Aborted"):
        await stage.ask("r", [1])


async def test_a_server_that_accepts_and_never_answers(stage: Stage) -> None:
    stage.fake.faults.never_answer = True
    with pytest.raises(TurnDeadline, match=r"limits.turn_seconds = 0.2"):
        await stage.ask("r", [1], seconds=0.2)
    assert stage.engine.load().running == 0
    asked = len(stage.fake.bodies)
    task = asyncio.ensure_future(stage.ask("a", [1]))
    await until(lambda: len(stage.fake.bodies) > asked)
    await stage.engine.abort("a")
    answer = await task
    assert (answer.finish_reason, answer.token_ids) == ("abort", [])


async def test_a_cancelled_turn_is_aborted_in_the_server(stage: Stage) -> None:
    task = asyncio.ensure_future(stage.ask("r", [1], max_new_tokens=200))
    await until(lambda: bool(stage.fake.calls))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not stage.fake.calls)


async def test_missed_probes_make_it_suspect_then_dead(stage: Stage) -> None:
    engine, faults = stage.engine, stage.fake.faults
    await engine.check()
    faults.unhealthy = True
    assert await engine.check() == common_pb.ENGINE_STATE_SUSPECT
    assert len((await stage.ask("still", [1])).token_ids) == 8
    # An answered turn is as good as a probe.
    assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY
    assert await engine.check() == common_pb.ENGINE_STATE_SUSPECT
    assert await engine.check() == common_pb.ENGINE_STATE_SUSPECT
    assert await engine.check() == common_pb.ENGINE_STATE_DEAD
    with pytest.raises(EngineDied):
        await stage.ask("r", [1])


async def test_a_server_that_is_gone_kills_the_engine_and_it_comes_back_stale(
    stage: Stage,
) -> None:
    tasks = [asyncio.ensure_future(stage.ask(f"r{i}", [1], max_new_tokens=200)) for i in range(3)]
    await until(lambda: drawing(stage.fake) == 3)
    await stage.fake.server.crash()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, EngineDied) for outcome in outcomes)
    assert stage.engine.state == common_pb.ENGINE_STATE_DEAD
    stage.fake.calls.clear()
    await stage.fake.server.start()
    # It died in the middle of an update of its own, say.
    stage.fake.paused = True
    await stage.engine.start()
    assert not stage.fake.paused
    assert (stage.engine.state, stage.engine.restarts) == (common_pb.ENGINE_STATE_STALE, 1)
    with pytest.raises(EngineStale):
        await stage.ask("r", [1])
    await stage.update(0, 0)
    assert len((await stage.ask("r", [1])).token_ids) == 8


async def test_an_old_release_gets_its_turns_aborted_and_continued(tmp_path: Path) -> None:
    fake = FakeSglang(CONFIG, old=True)
    models = [make_model(0), make_model(1)]
    async with serve(fake) as url:
        stage = await attach(fake, url, tmp_path)
        await stage.update(0, 0)
        tasks = [
            asyncio.ensure_future(stage.ask(f"r{i}", [i + 1], max_new_tokens=200)) for i in range(3)
        ]
        await until(lambda: drawing(fake) == 3)
        await stage.update(1, 1)
        for i, answer in enumerate(await asyncio.gather(*tasks)):
            assert len(answer.token_ids) == 200
            # An old release does not say which version drew a token: what it returns only after
            # the update, as on a busy machine, is drawn again.
            assert [span.version for span in answer.versions] in ([0, 1], [1])
            for span in answer.versions:
                expected = reference_logprobs(models[span.version], [i + 1], answer.token_ids)
                got = answer.logprobs[span.start : span.end]
                assert got == pytest.approx(expected[span.start : span.end], abs=2e-4)
        await stage.engine.stop()


async def test_a_turn_that_begins_while_a_version_is_prepared_goes_on_after_its_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSglang(CONFIG, old=True)
    models = [make_model(0), make_model(1)]
    async with serve(fake) as url:
        stage = await attach(fake, url, tmp_path)
        await stage.update(0, 0)
        preparing, prepared = asyncio.Event(), asyncio.Event()

        async def reserve() -> None:
            preparing.set()
            await prepared.wait()

        monkeypatch.setattr(stage.engine._server.updater._loader, "reserve", reserve)
        updating = asyncio.create_task(stage.update(1, 1))
        await preparing.wait()
        turn = asyncio.create_task(stage.ask("r", [1], max_new_tokens=200))
        await until(lambda: drawing(fake) == 1)
        prepared.set()
        await updating
        answer = await turn
        assert len(answer.token_ids) == 200
        for span in answer.versions:
            expected = reference_logprobs(models[span.version], [1], answer.token_ids)
            got = answer.logprobs[span.start : span.end]
            assert got == pytest.approx(expected[span.start : span.end], abs=2e-4)
        await stage.engine.stop()


async def test_servers_that_cannot_be_used(tmp_path: Path) -> None:
    fake = FakeSglang(CONFIG)
    async with serve(fake) as url:
        fake.info["dp_size"] = 2
        with pytest.raises(EngineStartFailed, match="data-parallel"):
            await attach(fake, url, tmp_path)
        fake.info["dp_size"] = 1
        fake.model_type = "llama"
        with pytest.raises(EngineStartFailed, match="'llama', the policy is a 'qwen3'"):
            await attach(fake, url, tmp_path)
        fake.model_type = "qwen3"
        second = SglangEngine("e1", "solver", policy_spec(kind="sglang", urls=[url]), replica=1)
        with pytest.raises(EngineStartFailed, match="one URL per replica"):
            await second.start()
    nobody = policy_spec(kind="sglang", urls=[url], start_timeout_seconds=0.3)
    engine = SglangEngine("e2", "solver", nobody)
    with pytest.raises(EngineStartFailed, match=r"start_timeout_seconds = 0.3"):
        await engine.start()
    assert engine.state == common_pb.ENGINE_STATE_DEAD


async def test_a_launch_that_fails_shows_the_log(tmp_path: Path) -> None:
    missing = policy_spec(kind="sglang", python=str(tmp_path / "no-python"))
    with pytest.raises(EngineStartFailed, match=r"there is no interpreter at .*no-python"):
        await SglangEngine("e0", "solver", missing).start()
    script = environment(
        tmp_path, SGLANG, before='[ "$1" = -m ] && echo "it breaks: $2" && exit 3\n'
    )
    broken = policy_spec(kind="sglang", python=script)
    with pytest.raises(EngineStartFailed, match=r"engine.python.*code 3") as info:
        await SglangEngine("e0", "solver", broken).start()
    assert "it breaks: sglang.launch_server" in str(info.value)


async def test_an_environment_without_the_server_is_refused_with_how_to_install_it(
    tmp_path: Path,
) -> None:
    python = environment(tmp_path, {"torch": "2.13.0"})
    with pytest.raises(EngineStartFailed, match="has no SGLang") as info:
        await SglangEngine("e0", "solver", policy_spec(kind="sglang", python=python)).start()
    assert info.value.field == "policies.solver.engine.python"
    assert 'pip install "sglang==0.5.21"' in (info.value.remedy or "")


@pytest.mark.parametrize("given", ["job", "environment", "nobody"])
async def test_a_server_is_launched_by_the_python_that_is_named(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job names it, else the worker's environment; `~` is the home directory."""
    (tmp_path / "env").mkdir()
    script = tmp_path / "env" / "python"
    script.write_text("#!/bin/sh\necho the environment of a server; exit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TROUPE_SGLANG_PYTHON", raising=False)
    named, options = "~/env/python", {}
    if given == "job":
        monkeypatch.setenv("TROUPE_SGLANG_PYTHON", "/nowhere/python")
        options["python"] = named
    elif given == "environment":
        monkeypatch.setenv("TROUPE_SGLANG_PYTHON", named)
    spec = policy_spec(kind="sglang", **options)
    with pytest.raises(EngineStartFailed, match=r"TROUPE_SGLANG_PYTHON") as info:
        await SglangEngine("e0", "solver", spec).start()
    said = "the environment of a server" if given != "nobody" else "has no SGLang"
    assert said in str(info.value)


@pytest.mark.slow
async def test_a_real_server_of_our_own(tmp_path: Path) -> None:
    python = interpreter(tmp_path)
    spec = policy_spec(kind="sglang", python=python, start_timeout_seconds=240)
    engine = SglangEngine("e0", "solver", spec)
    await engine.start()
    transfer = transfer_in(tmp_path)
    model = make_model(4)
    await engine.update_weights(publish(transfer, model, 4), transfer)
    params = Sampling(max_new_tokens=200)
    answer = await engine.generate("r", [1, 2], params, deadline_seconds=60)
    expected = reference_logprobs(model, [1, 2], answer.token_ids)
    assert answer.logprobs == pytest.approx(expected, abs=2e-4)
    assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY
    running = [
        asyncio.ensure_future(engine.generate(f"k{i}", [1], params, deadline_seconds=60))
        for i in range(4)
    ]
    await until(lambda: engine.load().running == 4)
    process = engine._server._process
    assert process is not None
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(outcome, EngineDied) for outcome in outcomes)
    await engine.start()
    assert engine.state == common_pb.ENGINE_STATE_STALE
    await engine.update_weights(publish(transfer, model, 4), transfer)
    assert len((await engine.generate("l", [1], params, deadline_seconds=60)).token_ids) == 200
    # No memory saver on a CPU: it is ended, and launched again.
    await engine.sleep()
    assert engine._server._process is None
    await engine.wake()
    assert engine.state == common_pb.ENGINE_STATE_STALE
    await engine.update_weights(publish(transfer, model, 4), transfer)
    again = await engine.generate("m", [1], params, deadline_seconds=60)
    assert again.logprobs == pytest.approx(
        reference_logprobs(model, [1], again.token_ids), abs=2e-4
    )
    await engine.stop()
    assert engine._server._process is None
