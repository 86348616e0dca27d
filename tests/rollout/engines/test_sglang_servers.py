"""Which servers are taken, how weights and adapters reach them, and how silent ones are found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.rollout.engines.errors import (
    BadTurn,
    EngineStartFailed,
    Refused,
    ReplyBroken,
    ServerGone,
    UpdateFailed,
)
from services.rollout.engines.servers import loaders, managed
from services.rollout.engines.servers.interface import ServerDescription, ServerLoad, Way
from services.rollout.engines.servers.loaders import (
    DirectoryLoader,
    EitherLoader,
    TensorLoader,
    choose_loader,
)
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.sglang.replies import load_of
from services.rollout.engines.sglang.server import SglangServer
from tests.rollout.engines.asking import ask
from tests.rollout.engines.models import CONFIG, make_model, policy_spec, publish, transfer_in
from tests.support.fake_sglang import FakeSglang, serve
from tests.support.interpreters import SGLANG, environment
from tests.support.waiting import PATIENCE, until
from tests.workflow.stage import make_tokenizer
from troupe.job import PolicySpec
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling

TWO = Sampling(max_new_tokens=2)


@pytest.fixture
async def fake() -> AsyncIterator[FakeSglang]:
    fake = FakeSglang(CONFIG)
    async with serve(fake):
        yield fake


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return transfer_in(tmp_path)


def engine_of(fake: FakeSglang, **engine: object) -> SglangEngine:
    url = f"http://127.0.0.1:{fake.server.port}"
    return SglangEngine("e0", "solver", policy_spec(kind="sglang", urls=[url], **engine))


async def up(fake: FakeSglang, transfer: Transfer, **engine: object) -> SglangEngine:
    made = engine_of(fake, **engine)
    await made.start()
    await made.update_weights(publish(transfer, make_model(0), 0), transfer)
    return made


async def test_a_server_with_another_vocabulary_is_refused(fake: FakeSglang) -> None:
    fake.vocabulary = 97
    engine = engine_of(fake)
    with pytest.raises(EngineStartFailed, match="97 tokens, the policy one of 96") as info:
        await engine.start()
    assert info.value.field == "policies.solver.engine.urls"
    assert engine.state == common_pb.ENGINE_STATE_DEAD
    assert fake.calls == {}
    fake.vocabulary = 96
    await engine.start()
    assert engine.state == common_pb.ENGINE_STATE_STALE
    await engine.stop()


async def test_a_server_with_another_tokenizer_is_refused(fake: FakeSglang, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    spec = policy_spec(kind="sglang", urls=[f"http://127.0.0.1:{fake.server.port}"])
    model = spec.language_model.model_copy(update={"tokenizer": str(tmp_path)})
    spec = PolicySpec.model_validate({**spec.model_dump(), "model": model.model_dump()})
    fake.tokenizer = lambda text: [ord(char) % 96 for char in text]
    engine = SglangEngine("e0", "solver", spec)
    with pytest.raises(EngineStartFailed, match="another tokenizer") as info:
        await engine.start()
    assert info.value.field == "policies.solver.engine.urls"
    fake.tokenizer = lambda text: tokenizer.encode(text, add_special_tokens=False)
    await engine.start()
    await engine.stop()


async def test_two_engines_cannot_have_one_server(fake: FakeSglang) -> None:
    first, second = engine_of(fake), engine_of(fake)
    await first.start()
    with pytest.raises(EngineStartFailed, match="another engine of this worker") as info:
        await second.start()
    assert info.value.field == "policies.solver.engine.urls"
    await second.stop()
    await first.start()  # alive: nothing to do
    await first.stop()
    third = engine_of(fake)
    await third.start()
    await third.stop()


async def test_a_server_on_our_port_that_is_not_ours_is_left_alone(
    fake: FakeSglang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managed, "free_port", lambda: fake.server.port)
    python = environment(tmp_path, SGLANG, before='[ "$1" = -m ] && exec sleep 60\n')
    spec = policy_spec(kind="sglang", python=python)
    engine = SglangEngine("e0", "solver", spec)
    with pytest.raises(EngineStartFailed, match="is held by another server, 'm'"):
        await engine.start()
    assert set(fake.seen) <= {"/model_info", "/server_info"}
    assert engine._server._process is None


async def test_a_reply_whose_connection_breaks_fails_its_turn_only(
    fake: FakeSglang, transfer: Transfer
) -> None:
    engine = await up(fake, transfer)
    fake.faults.cut_connection = True
    with pytest.raises(ReplyBroken, match="ClientPayloadError"):
        await ask(engine, "r", [1])
    fake.faults.cut_connection = False
    assert len((await ask(engine, "r", [1])).token_ids) == 8
    assert engine.state == common_pb.ENGINE_STATE_HEALTHY
    await engine.stop()


async def test_zero_tokens_and_a_stop_token_that_never_comes(
    fake: FakeSglang, transfer: Transfer
) -> None:
    engine = await up(fake, transfer)
    fake.bodies.clear()
    with pytest.raises(BadTurn, match="max_new_tokens = 0"):
        await ask(engine, "r", [1], max_new_tokens=0)
    assert fake.bodies == []
    free = await ask(engine, "free", [1], temperature=0.0, max_new_tokens=20)
    never = next(token for token in range(96) if token not in free.token_ids)
    answer = await ask(
        engine, "r", [1], temperature=0.0, max_new_tokens=20, stop_token_ids=(never,)
    )
    assert (answer.token_ids, answer.finish_reason) == (free.token_ids, "length")
    await engine.stop()


async def test_a_server_that_is_healthy_and_generates_nothing_is_found(
    fake: FakeSglang, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await up(fake, transfer)
    assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY
    fake.faults.never_answer = True
    assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY  # it says so
    monkeypatch.setattr(managed, "PROBE_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("services.rollout.engines.sglang.server.PROBE_SECONDS", 1.0)
    assert await engine.check() == common_pb.ENGINE_STATE_SUSPECT
    fake.faults.never_answer = False
    assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY
    fake.faults.never_answer = True
    for _ in range(3):
        state = await engine.check()
    assert state == common_pb.ENGINE_STATE_DEAD
    await engine.stop()


async def test_turns_that_never_end_where_there_is_room_bring_a_probe(
    fake: FakeSglang, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await up(fake, transfer)
    monkeypatch.setattr(managed, "STALL_SECONDS", 0.0)
    await engine.check()  # counts the turn of the update's proof, if any
    task = asyncio.ensure_future(ask(engine, "r", [1], max_new_tokens=250))
    await until(lambda: len(fake.calls) == 1)
    fake.bodies.clear()
    assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY
    assert [body["sampling_params"]["max_new_tokens"] for body in fake.bodies] == [1]
    await task
    await engine.stop()


async def test_a_server_whose_answers_are_all_useless_is_found(
    fake: FakeSglang, transfer: Transfer
) -> None:
    """They are no proof of life, however many: else the emptiest engine is the broken one."""
    engine = await up(fake, transfer)
    await engine.check()
    fake.faults.unhealthy = True
    faults = ("cut_reply", "cut_connection", "abort_everything")
    for fault in faults:
        setattr(fake.faults, fault, True)
        with pytest.raises(ReplyBroken):
            await ask(engine, fault, [1])
        setattr(fake.faults, fault, False)
        state = await engine.check()
    assert state == common_pb.ENGINE_STATE_DEAD
    await engine.stop()


async def test_a_server_that_is_full_of_others_turns_is_not_dead(
    fake: FakeSglang, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe waits behind them, for minutes where prompts are long."""
    engine = await up(fake, transfer)
    monkeypatch.setattr(managed, "PROBE_AFTER_SECONDS", 0.0)
    # Long enough for a double that gets little of a busy machine.
    monkeypatch.setattr("services.rollout.engines.sglang.server.PROBE_SECONDS", 2.0)
    monkeypatch.setattr("services.rollout.engines.servers.host._LOAD_SECONDS", 60.0)
    fake.faults.queue = 3
    for _ in range(4):
        assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY
    fake.faults.queue, fake.faults.never_answer = 0, True
    for _ in range(4):
        state = await engine.check()
    assert state == common_pb.ENGINE_STATE_DEAD
    await engine.stop()


async def test_a_server_that_hangs_gets_no_turns_while_it_is_asked_again(
    fake: FakeSglang, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await up(fake, transfer)
    monkeypatch.setattr("services.rollout.engines.servers.host._CHECK_SECONDS", 0.2)
    await engine.check()
    fake.faults.hangs = True
    async with asyncio.timeout(PATIENCE):
        assert await engine.check() == common_pb.ENGINE_STATE_SUSPECT
        fake.faults.hangs = False
        assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY
    await engine.stop()


async def test_a_server_that_breaks_off_while_it_is_attached_to_is_waited_for(
    fake: FakeSglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reset(server: SglangServer) -> None:
        raise ServerGone("connection reset")

    monkeypatch.setattr(SglangServer, "resume", reset)
    engine = engine_of(fake)
    await engine.start()
    assert engine.state == common_pb.ENGINE_STATE_STALE
    await engine.stop()


async def test_a_server_that_does_not_see_our_files_gets_tensors(
    fake: FakeSglang, transfer: Transfer
) -> None:
    fake.faults.blind = True
    engine = await up(fake, transfer)
    assert "/update_weights_from_tensor" in fake.seen
    fake.seen.clear()
    await engine.update_weights(publish(transfer, make_model(1), 1), transfer)
    assert "/update_weights_from_disk" not in fake.seen  # once was enough
    await engine.stop()
    strict = engine_of(fake, update="disk")
    await strict.start()
    with pytest.raises(UpdateFailed, match="Failed to get weights"):
        await strict.update_weights(publish(transfer, make_model(1), 2), transfer)
    await strict.stop()


async def test_tensors_go_in_buckets_and_are_named_when_all_are_in(
    fake: FakeSglang, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaders, "_VALUE_BUCKET_BYTES", 8 << 10)
    engine = engine_of(fake, update="tensor")
    await engine.start()
    fake.seen.clear()
    await engine.update_weights(publish(transfer, make_model(0), 0), transfer)
    calls = [path for path in fake.seen if "update" in path]
    calls = calls[: calls.index("/update_weight_version") + 1]  # names are tried after that
    assert calls.count("/update_weights_from_tensor") > 3
    assert calls[0] == "/begin_weight_update"
    assert calls[-2:] == ["/end_weight_update", "/update_weight_version"]
    assert (await ask(engine, "r", [1])).versions[0].version == 0
    await engine.stop()


def test_the_way_of_weights_follows_setting_place_and_release(tmp_path: Path) -> None:
    new: frozenset[Way] = frozenset({"directory", "tensors"})
    old: frozenset[Way] = frozenset({"directory"})
    directory = DirectoryLoader(tmp_path, make_model(0).config)

    def way(setting: loaders.UpdateSetting, ways: frozenset[Way], place: str) -> type:
        chosen = choose_loader(
            setting,
            ServerDescription(ways),
            directory,
            launched=place == "launched",
            near=place != "far",
            policy="solver",
        )
        return type(chosen)

    assert way("auto", new, "launched") is EitherLoader
    assert way("auto", new, "near") is EitherLoader
    assert way("auto", new, "far") is TensorLoader
    assert way("auto", old, "launched") is DirectoryLoader
    assert way("disk", new, "launched") is DirectoryLoader
    assert way("tensor", new, "near") is TensorLoader
    with pytest.raises(EngineStartFailed, match=r"engine.update = tensor"):
        way("tensor", old, "launched")


def test_load_reports_of_all_releases() -> None:
    new = {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1, "token_usage": 0.5}]}
    assert load_of(new) == ServerLoad(running=2, waiting=1, kv_usage=0.5)
    old = {"loads": [{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 9}]}
    assert load_of(old) == ServerLoad(running=3, waiting=2)
    assert load_of({"loads": []}) == ServerLoad()


async def test_a_load_report_reaches_the_engines_load(fake: FakeSglang, transfer: Transfer) -> None:
    engine = await up(fake, transfer)
    client = SglangServer(f"http://127.0.0.1:{fake.server.port}")
    await client.describe()
    tasks = [asyncio.ensure_future(ask(engine, f"r{i}", [1], max_new_tokens=100)) for i in range(2)]
    await until(lambda: len(fake.calls) == 2)
    await client.pause("requeue")
    engine.host.reported = await engine._server.api.load()
    assert (engine.load().waiting, engine.load().uncached_tokens) == (2, 14)
    await client.resume()
    await asyncio.gather(*tasks)
    await client.close()
    await engine.stop()


async def test_a_request_after_a_fault_of_the_server_gets_a_connection_of_its_own() -> None:
    """uvicorn closes a connection soon after it has answered an exception of its program over it: a
    request that is sent over it then is lost."""
    first = True

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal first
        faulty, first = first, False
        await reader.readuntil(b"{}")
        status = b"500 Internal Server Error" if faulty else b"200 OK"
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: 2\r\n\r\n{}" % status)
        await writer.drain()
        if faulty:
            await reader.read(1)  # the next request is on its way
        writer.transport.abort()

    async with await asyncio.start_server(answer, "127.0.0.1") as listening:
        port = listening.sockets[0].getsockname()[1]
        server = SglangServer(f"http://127.0.0.1:{port}")
        try:
            with pytest.raises(Refused):
                await server.flush_cache()
            await asyncio.wait_for(server.flush_cache(), PATIENCE)
        finally:
            await server.close()
