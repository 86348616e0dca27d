"""A server that one rollout worker keeps and another one follows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.rollout.engines.errors import EngineStartFailed, TurnReturned, UpdateFailed
from services.rollout.engines.servers import managed
from services.rollout.engines.sglang.engine import SglangEngine
from tests.rollout.engines.asking import ask, prompt
from tests.rollout.engines.models import (
    CONFIG,
    make_model,
    policy_spec,
    publish,
    reference_logprobs,
    transfer_in,
)
from tests.support.fake_sglang import FakeSglang, serve
from tests.support.waiting import PATIENCE, until
from troupe.rpc import Unavailable
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb

HEALTHY, STALE = common_pb.ENGINE_STATE_HEALTHY, common_pb.ENGINE_STATE_STALE


@dataclass
class Pair:
    """A server, the engine that keeps it and one of another worker, which follows."""

    fake: FakeSglang
    keeper: SglangEngine
    follower: SglangEngine
    transfer: Transfer

    def ref(self, version: int) -> common_pb.WeightsRef:
        """Weights of `version`, published."""
        return publish(self.transfer, make_model(version), version)

    async def update(self, version: int) -> common_pb.WeightsRef:
        """The keeper brings the server to a version."""
        ref = self.ref(version)
        await self.keeper.update_weights(ref, self.transfer)
        return ref


@pytest.fixture(autouse=True)
def workers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are processes of their own; here two engines of one process share a server."""
    monkeypatch.setattr(managed, "claim_url", lambda url, holder: True)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    fake = FakeSglang(CONFIG)
    async with serve(fake) as url:
        engines = [
            SglangEngine(name, "solver", policy_spec(kind="sglang", urls=[url]))
            for name in ("kept", "followed")
        ]
        keeper, follower = engines
        follower.follow_keeper(True)
        made = Pair(fake, keeper, follower, transfer_in(tmp_path))
        await keeper.start()
        ref = await made.update(0)
        await follower.start()
        assert follower.state == STALE
        await follower.follow(ref)
        assert (follower.state, follower.version, follower.checksum) == (HEALTHY, 0, ref.checksum)
        yield made
        for engine in engines:
            await engine.stop()


async def test_a_follower_serves_what_its_keeper_has_loaded(pair: Pair) -> None:
    ids = prompt(random.Random(1))
    for version in (1, 2):
        ref = await pair.update(version)
        await pair.follower.follow(ref)
        answer = await ask(pair.follower, f"t{version}", ids)
        assert {span.version for span in answer.versions} == {version}
        expected = reference_logprobs(make_model(version), ids, answer.token_ids)
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)


async def test_a_version_that_the_server_does_not_hold_is_not_followed(pair: Pair) -> None:
    with pytest.raises(UpdateFailed, match="holds version '0'"):
        await pair.follower.follow(pair.ref(7))
    assert (pair.follower.state, pair.follower.version) == (HEALTHY, 0)


async def test_tokens_of_a_version_wait_until_it_is_followed(pair: Pair) -> None:
    ref = await pair.update(1)
    turn = asyncio.create_task(ask(pair.follower, "early", prompt(random.Random(2))))
    await asyncio.sleep(0.2)
    assert not turn.done()
    await pair.follower.follow(ref)
    answer = await turn
    assert {span.version for span in answer.versions} == {1}


async def test_a_turn_that_an_update_overtakes_knows_the_version_of_each_token(pair: Pair) -> None:
    ids = prompt(random.Random(3), high=20)
    turn = asyncio.create_task(ask(pair.follower, "long", ids, max_new_tokens=120))
    await until(lambda: any(len(call.tokens) > 10 for call in pair.fake.calls.values()))
    ref = await pair.update(1)
    await pair.follower.follow(ref)
    answer = await turn
    assert len(answer.token_ids) == 120
    offset = 0
    for span in answer.versions:
        drawn = answer.token_ids[span.start : span.end]
        expected = reference_logprobs(
            make_model(span.version), ids + answer.token_ids[: span.start], drawn
        )
        assert answer.logprobs[span.start : span.end] == pytest.approx(expected, abs=1e-4)
        assert span.start == offset
        offset = span.end
    assert [span.version for span in answer.versions] == [0, 1]


async def test_a_follower_that_comes_in_the_middle_of_an_update_leaves_the_server_paused(
    pair: Pair,
) -> None:
    await pair.follower.stop()
    pair.fake.paused = True
    pair.fake.seen.clear()
    late = SglangEngine("late", "solver", pair.follower._spec)
    late.follow_keeper(True)
    await late.start()
    assert pair.fake.paused
    assert not [path for path in pair.fake.seen if "continue" in path or "update" in path]
    await late.stop()
    pair.fake.paused = False


async def test_a_paused_server_is_not_dead_for_its_followers(pair: Pair) -> None:
    pair.fake.paused = True
    for _ in range(4):
        assert await pair.follower.check() == HEALTHY
    pair.fake.paused = False


async def test_a_server_that_was_started_anew_is_not_followed_any_more(pair: Pair) -> None:
    pair.fake.version = "default"
    assert await pair.follower.check() == STALE
    with pytest.raises(Unavailable):
        await ask(pair.follower, "stale", prompt(random.Random(4)))


async def test_weights_without_a_name_are_no_version(pair: Pair) -> None:
    """Between two looks at the server, its answers tell."""
    pair.fake.version = "default"
    turn = asyncio.create_task(ask(pair.follower, "unnamed", prompt(random.Random(5))))
    await asyncio.sleep(0.2)
    assert not (turn.done() and turn.exception() is None)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)


async def test_a_release_that_cannot_be_paused_is_not_shared() -> None:
    async with serve(FakeSglang(CONFIG, old=True)) as url:
        engine = SglangEngine("followed", "solver", policy_spec(kind="sglang", urls=[url]))
        engine.follow_keeper(True)
        with pytest.raises(EngineStartFailed, match="cannot be paused") as info:
            await engine.start()
        assert info.value.field == "policies.solver.engine.urls"
        await engine.stop()


async def test_a_follower_takes_over_from_a_keeper_that_died_in_a_load(pair: Pair) -> None:
    pair.fake.paused = pair.fake.session = True
    pair.follower.follow_keeper(False)
    pair.follower.distrust("its keeper was lost")
    assert pair.follower.state == STALE
    await pair.follower.update_weights(pair.ref(1), pair.transfer)
    assert not pair.fake.paused
    answer = await ask(pair.follower, "after", prompt(random.Random(6)))
    assert {span.version for span in answer.versions} == {1}


async def test_turns_with_tokens_that_a_lost_keeper_had_not_verified_are_returned(
    pair: Pair,
) -> None:
    await pair.update(1)
    turn = asyncio.create_task(ask(pair.follower, "early", prompt(random.Random(7))))
    await until(lambda: any("early" in body.get("rid", "") for body in pair.fake.bodies))
    await until(lambda: not pair.fake.calls)
    pair.follower.follow_keeper(False)
    pair.follower.distrust("its keeper was lost")
    await pair.follower.update_weights(pair.ref(2), pair.transfer)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(TurnReturned, match="version 1"):
            await turn


async def test_a_turn_that_its_keepers_pause_aborts_is_returned_at_once(pair: Pair) -> None:
    pair.follower._in_flight = "restart"
    turn = asyncio.create_task(
        ask(pair.follower, "long", prompt(random.Random(8), high=20), max_new_tokens=120)
    )
    await until(lambda: any(len(call.tokens) > 5 for call in pair.fake.calls.values()))
    for call in pair.fake.calls.values():
        call.aborted = True
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(TurnReturned, match="new weights"):
            await turn


async def test_workers_ask_a_server_for_the_same_turn_without_a_clash(pair: Pair) -> None:
    """A trajectory whose worker was lost runs again elsewhere while its last turn lives on."""
    ids = prompt(random.Random(9), high=20)
    both = [
        asyncio.create_task(ask(engine, "trajectory/0", ids, max_new_tokens=60))
        for engine in (pair.keeper, pair.follower)
    ]
    answers = await asyncio.gather(*both)
    assert [len(answer.token_ids) for answer in answers] == [60, 60]


@pytest.mark.parametrize("knows", [True, False])
async def test_no_token_of_weights_that_are_tried_out_counts_as_one_of_a_version(
    pair: Pair, knows: bool
) -> None:
    """A new keeper tries which names of tensors a server takes, unless it has followed a keeper
    that knows; others' turns go on meanwhile."""
    late = SglangEngine("late", "solver", pair.follower._spec)
    late.follow_keeper(True)
    await late.start()
    if knows:
        await late.follow(pair.ref(0))
    await pair.keeper.stop()
    model, over = make_model(0), False

    async def play(number: int) -> int:
        """Turns that were answered, all by version 0."""
        ids, answered = prompt(random.Random(number), high=20), 0
        while not over:
            try:
                answer = await ask(pair.follower, f"t{number}", ids, max_new_tokens=2)
            except Unavailable:  # weights without a name: the router asks again
                await asyncio.sleep(0.01)
                continue
            expected = reference_logprobs(model, ids, answer.token_ids)
            assert answer.logprobs == pytest.approx(expected, abs=1e-4)
            answered += 1
        return answered

    players = [asyncio.create_task(play(number)) for number in range(4)]
    late.follow_keeper(False)
    late.distrust("its keeper was lost")
    loads = len([path for path in pair.fake.seen if "update_weights_from" in path])
    await late.update_weights(pair.ref(0), pair.transfer)
    loads = len([path for path in pair.fake.seen if "update_weights_from" in path]) - loads
    over = True
    assert all(await asyncio.gather(*players))
    assert (loads == 1) == knows
    await late.stop()
