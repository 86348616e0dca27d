"""The simulated engine: its time model, and that it is an engine in all else."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.engines.errors import BadTurn, EngineStale, PromptTooLong
from services.rollout.engines.factory import make_engine
from services.rollout.engines.requests import VersionSpan
from testbed import simulated_engine
from testbed.simulated_engine import SimulatedEngine, draw_response
from testbed.timeline import read_spans
from tests.rollout.engines.asking import ask
from tests.rollout.engines.models import VOCABULARY, make_model, policy_spec, publish, transfer_in
from tests.support.waiting import until
from troupe.job import PolicySpec, SimulatedSpec
from troupe.transfer import Transfer
from troupe.transfer.errors import Corrupt
from troupe.twin.batch import EngineBatch
from troupe.v1 import common_pb2 as common_pb

# 2 ms per token alone, 0.1 ms more per concurrent turn; responses run into `max_new_tokens`.
PACE = SimulatedSpec(
    prefill_tokens_per_second=10_000,
    decode_seconds=0.0019,
    decode_seconds_per_turn=0.0001,
    response_tokens_mean=10_000,
    response_tokens_sigma=0,
    load_seconds=0.05,
)
# A test says how long a turn takes at least; on a machine that does other things it takes longer.
LATE = 1.5


def simulated_policy(pace: SimulatedSpec = PACE) -> PolicySpec:
    return policy_spec().model_copy(update={"simulated": pace})


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return transfer_in(tmp_path)


@pytest.fixture
async def engine(transfer: Transfer, tmp_path: Path) -> AsyncIterator[SimulatedEngine]:
    made = make_engine("e0", "solver", simulated_policy(), trace_dir=tmp_path / "trace")
    assert isinstance(made, SimulatedEngine)
    await made.start()
    await made.update_weights(publish(transfer, make_model(0), 0), transfer)
    yield made
    await made.stop()


@pytest.mark.slow
async def test_a_turn_takes_its_modelled_time(engine: SimulatedEngine) -> None:
    began = time.monotonic()
    got = await ask(engine, "t", [1] * 100, max_new_tokens=100)
    took = time.monotonic() - began
    assert len(got.token_ids) == len(got.logprobs) == 100
    assert got.finish_reason == "length"
    # 100 tokens of prompt at 10,000 a second, 100 steps of 2 ms; a busy machine is late.
    assert 0.209 <= took < 0.21 + LATE
    assert 0.209 <= got.generate_seconds <= took


@pytest.mark.slow
async def test_hundreds_of_turns_slow_each_other_as_modelled_and_cost_little(
    engine: SimulatedEngine,
) -> None:
    began, cpu = time.monotonic(), time.process_time()
    turns = [ask(engine, f"t{i}", [1], max_new_tokens=100) for i in range(200)]
    await asyncio.gather(*turns)
    took, cpu = time.monotonic() - began, time.process_time() - cpu
    # 200 tokens of prompt, then 100 steps of 1.9 + 200 * 0.1 ms.
    assert 2.2 <= took < 2.21 + LATE
    assert cpu < took / 2


async def test_an_engine_without_verified_weights_serves_nothing(
    transfer: Transfer, tmp_path: Path
) -> None:
    engine = SimulatedEngine("e1", "solver", simulated_policy())
    await engine.start()
    assert engine.state == common_pb.ENGINE_STATE_STALE
    with pytest.raises(EngineStale):
        await ask(engine, "t", [1])
    ref = publish(transfer, make_model(0), 0)
    wrong = common_pb.WeightsRef()
    wrong.CopyFrom(ref)
    wrong.checksum = "0" * 32
    with pytest.raises(Corrupt):
        await engine.update_weights(wrong, transfer)
    assert engine.state == common_pb.ENGINE_STATE_STALE
    assert await engine.update_weights(ref, transfer) == PACE.load_seconds
    assert (engine.state, engine.version) == (common_pb.ENGINE_STATE_HEALTHY, 0)
    assert engine.checksum == ref.checksum
    with pytest.raises(PromptTooLong):
        await ask(engine, "long", [1] * 256)
    with pytest.raises(BadTurn):
        await ask(engine, "strange", [VOCABULARY])
    await engine.stop()
    assert engine.state == common_pb.ENGINE_STATE_STOPPED


@pytest.mark.slow
async def test_weights_change_under_a_turn_that_goes_on(
    engine: SimulatedEngine, transfer: Transfer
) -> None:
    ref = publish(transfer, make_model(1), 1)
    turn = asyncio.create_task(ask(engine, "t", [1] * 10, max_new_tokens=100))
    await asyncio.sleep(0.1)
    before, began = engine.load().outstanding_tokens, time.monotonic()
    exposed = await engine.update_weights(ref, transfer)
    during, took = engine.load().outstanding_tokens, time.monotonic() - began
    assert exposed == PACE.load_seconds
    got = await turn
    first, second = got.versions
    assert (first.version, first.start) == (0, 0)
    assert second == VersionSpan(1, first.end, 100)
    # Tokens of 2 ms before the update, none while it loaded.
    assert 40 <= first.end < 100
    assert before - during <= (took - exposed) / 0.002 + 1
    # Its 10 prompt tokens and the tokens drawn by then were read again.
    least = 0.001 + 0.2 + exposed + (10 + first.end) / 10_000
    assert least - 0.002 <= got.generate_seconds < least + LATE


@pytest.mark.slow
async def test_an_aborted_simulated_turn_returns_its_tokens_so_far(
    engine: SimulatedEngine, tmp_path: Path
) -> None:
    began = time.monotonic()
    turn = asyncio.create_task(ask(engine, "t", [1], max_new_tokens=200))
    other = asyncio.create_task(ask(engine, "u", [1], max_new_tokens=150))
    await until(lambda: engine.load().running == 2)
    await asyncio.sleep(0.05)
    await engine.abort("t")
    took = time.monotonic() - began
    await engine.abort("unknown")
    got = await turn
    assert got.finish_reason == "abort"
    # A step of two turns takes 2.1 ms.
    assert 20 <= len(got.token_ids) <= took / 0.0021 + 1
    assert len((await other).token_ids) == 150
    assert engine.load().running == 0
    await engine.stop()
    spans = read_spans(tmp_path / "trace")
    assert {span.what for span in spans} == {"load", "generate"}
    busy = [span for span in spans if span.what == "generate"]
    assert 1 < max(span.level for span in busy) <= 2


@pytest.mark.slow
async def test_a_turn_that_would_end_while_it_is_aborted(
    engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = asyncio.create_task(ask(engine, "t", [1], max_new_tokens=200))  # 0.4 s
    await until(lambda: engine.load().running == 1)
    began, looks = time.monotonic(), itertools.count(1)
    with monkeypatch.context() as patch:
        # The clock goes on by 0.3 s whenever somebody looks.
        clock = SimpleNamespace(time=time.time, monotonic=lambda: began + 0.3 * next(looks))
        patch.setattr(simulated_engine, "time", clock)
        await engine.abort("t")
    got = await turn
    assert got.finish_reason == "abort"
    assert 0 < len(got.token_ids) < 200


@pytest.mark.slow
async def test_a_cancelled_turn_leaves_the_batch(engine: SimulatedEngine) -> None:
    turn = asyncio.create_task(ask(engine, "t", [1], max_new_tokens=200))
    await until(lambda: engine.load().running == 1)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert engine.load().running == 0
    assert len((await ask(engine, "t", [1], max_new_tokens=3)).token_ids) == 3


def test_a_response_is_a_function_of_its_seed() -> None:
    pace = PACE.model_copy(update={"response_tokens_mean": 40.0, "response_tokens_sigma": 0.8})

    def draw(seed: int) -> list[int]:
        stops = frozenset({3, 7})
        return draw_response(
            pace, seed=seed, vocabulary=50, stop_ids=stops, max_new_tokens=120
        ).token_ids

    responses = [draw(seed) for seed in range(2000)]
    assert responses[5] == draw(5)
    assert responses[5] != responses[6]
    lengths = [len(response) for response in responses]
    assert max(lengths) == 120
    # Cutting the tail at 120 takes a little off the mean.
    assert 36 < sum(lengths) / len(lengths) < 41
    ended = [response for response in responses if response[-1] == 3]
    assert len(ended) > 0.9 * len(responses)
    assert not any({3, 7} & set(response[:-1]) for response in responses)
    assert set().union(*responses) == set(range(50)) - {7}


def test_the_batch_keeps_time_exactly() -> None:
    batch = EngineBatch(PACE)
    batch.admit("a", 100, 100, 1.0)
    # 10 ms of reading, then 2 ms a token.
    assert batch.next_end() == pytest.approx(1.21)
    assert batch.advance(1.11) == []
    assert batch.drawn("a") == 50
    # The second prompt holds the first turn up; then both take 2.1 ms a token.
    batch.admit("b", 200, 10, 1.11)
    assert batch.advance(1.13) == []
    assert batch.drawn("a") == 50
    assert batch.next_end() == pytest.approx(1.151)
    assert batch.advance(1.151 + 1e-6) == ["b"]
    assert batch.next_end() == pytest.approx(1.231)
    # Weights that load block it too, for as long as they take.
    batch.block(math.inf, 1.151)
    assert batch.advance(5.0) == []
    assert batch.next_end() == math.inf
    batch.unblock(5.0)
    assert batch.next_end() == pytest.approx(5.08, abs=1e-4)
    batch.remove("a")
    batch.remove("a")
    assert batch.next_end() is None


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.floats(0, 2), st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=12
    ),
    glances=st.lists(st.floats(0, 4), max_size=20),
)
def test_when_turns_end_does_not_depend_on_when_one_looks(
    turns: list[tuple[float, int, int]], glances: list[float]
) -> None:
    def run(extra: list[float]) -> dict[str, float]:
        """When each turn ended, from the batch's own announcements."""
        batch, ends = EngineBatch(PACE), dict[str, float]()
        looks = iter(sorted(extra))
        look = next(looks, None)
        arrivals = sorted((at, f"t{i}", p, n) for i, (at, p, n) in enumerate(turns))

        def glance(until: float) -> None:
            nonlocal look
            while look is not None and look <= until:
                step(look)
                look = next(looks, None)

        def step(now: float) -> None:
            while (end := batch.next_end()) is not None and end <= now:
                for key in batch.advance(end + 1e-9):
                    ends[key] = end
            for key in batch.advance(now):
                ends[key] = now

        for at, key, prompt, length in arrivals:
            glance(at)
            step(at)
            batch.admit(key, prompt, length, at)
        glance(5)
        step(60)
        assert len(batch) == 0
        return ends

    plain, watched = run([]), run(glances)
    assert set(plain) == set(watched)
    for key, end in plain.items():
        assert watched[key] == pytest.approx(end, abs=1e-3)
