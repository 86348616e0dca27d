"""Turns that lose their engine go on from their tokens, or start over where bits are promised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engines.factory import make_engine
from services.rollout.serving.router import Losses
from tests.rollout.fragile import Workshop
from tests.rollout.house import House, evaluation, make_spec
from tests.support.waiting import PATIENCE, until
from troupe.job import JobSpec
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow.backend import Sampling

COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED
TWO: dict[str, Any] = {"big": {"engine": {"replicas": 2}}}
PATIENT = {"turn_seconds": PATIENCE, "trajectory_seconds": PATIENCE}
pytestmark = pytest.mark.usefixtures("quick_restarts")


@pytest.fixture
def workshop() -> Workshop:
    return Workshop()


async def disturbed(
    house: House, workshop: Workshop, disturb: Callable[[Any], Any]
) -> tuple[dict[str, rollout_pb.TrajectoryEvent], dict[str, rollout_pb.TrajectoryEvent], Losses]:
    """The same trajectories twice, the second time with something done to an engine in the midst
    of its turns."""
    quiet = await house.run(evaluation(4))
    router = house.service._jobs.get(house.job_id).policy("big").router
    losses = Losses()
    take = router.take_losses

    def counted() -> Losses:  # the service's metrics take them too
        taken = take()
        losses.resumed_turns += taken.resumed_turns
        losses.resumed_tokens += taken.resumed_tokens
        losses.restarted_turns += taken.restarted_turns
        return taken

    router.take_losses = counted  # type: ignore[method-assign]
    first = workshop.engines["big"][0]
    # On a busy machine its thread would be through before this loop looks.
    first.halt_at = first.load().generated_tokens + 20
    running = asyncio.create_task(house.run(evaluation(4)))
    await until(first.halted.is_set)
    await disturb(first)
    first.let_go.set()
    loud = await running
    router.take_losses()
    assert {e.state for e in loud.values()} == {COMPLETED}
    return quiet, loud, losses


async def die(engine: Any) -> None:
    engine.pull_plug()


async def drain(engine: Any) -> None:
    await engine.drain("it goes elsewhere", deadline_seconds=0)


@pytest.mark.parametrize("disturb", [die, drain])
async def test_a_lost_turn_goes_on_from_its_tokens_and_says_the_same(
    house: House, workshop: Workshop, disturb: Callable[[Any], Any]
) -> None:
    await house.prepare("long_winded", policies=TWO, limits=PATIENT)
    quiet, loud, losses = await disturbed(house, workshop, disturb)
    assert losses.resumed_turns >= 1
    assert losses.resumed_tokens >= 1
    # Each token was drawn with its own position's randomness, wherever that was. Read in other
    # pieces a prompt rounds otherwise, which may once turn a draw.
    same = [event.turns[0].response == quiet[key].turns[0].response for key, event in loud.items()]
    assert sum(same) >= 3
    for key, event in loud.items():
        [turn] = event.turns
        assert [(s.start, s.end) for s in turn.versions] == [(0, turn.response_tokens)]
        assert turn.prompt_tokens == quiet[key].turns[0].prompt_tokens


async def test_the_later_piece_has_the_tokens_and_log_probs_of_the_whole(
    house: House, workshop: Workshop
) -> None:
    await house.prepare("long_winded")
    [engine] = workshop.engines["big"]
    for seed in range(3):
        how = Sampling(max_new_tokens=60, seed=seed)
        whole = await engine.generate("whole", [5, 6, 7], how, deadline_seconds=PATIENCE)
        for cut in {1, len(whole.token_ids) // 2, len(whole.token_ids) - 1}:
            prompt = [5, 6, 7, *whole.token_ids[:cut]]
            how = Sampling(max_new_tokens=60 - cut, seed=seed, drawn=cut)
            rest = await engine.generate("rest", prompt, how, deadline_seconds=PATIENCE)
            assert rest.token_ids == whole.token_ids[cut:]
            assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-4)
            assert rest.finish_reason == whole.finish_reason


async def test_turns_of_a_deterministic_job_start_over(house: House, workshop: Workshop) -> None:
    await house.prepare(
        "long_winded", policies=TWO, limits=PATIENT, pipeline={"deterministic": True}
    )
    quiet, loud, losses = await disturbed(house, workshop, die)
    assert losses.restarted_turns >= 1
    assert losses.resumed_turns == 0
    for key, event in loud.items():
        assert event.turns[0].response == quiet[key].turns[0].response


async def test_a_simulated_turn_is_as_long_in_two_pieces_as_in_one(tmp_path: Path) -> None:
    simulated = {"decode_seconds": 0.001, "response_tokens_mean": 40, "load_seconds": 0.0}
    spec = JobSpec.model_validate(make_spec("one_turn", policies={"big": {"simulated": simulated}}))
    engine = make_engine("e", "big", spec.policies["big"])
    await engine.start()
    transfer = Transfer(tmp_path)
    import torch

    manifest = transfer.set("w", {"nothing": torch.zeros(1)})
    ref = common_pb.WeightsRef(policy="big", version=0, key="w", checksum=manifest.checksum)
    await engine.update_weights(ref, transfer)
    for seed in range(5):
        whole = await engine.generate(
            "whole", [5], Sampling(max_new_tokens=64, seed=seed), deadline_seconds=PATIENCE
        )
        half = len(whole.token_ids) // 2
        rest = await engine.generate(
            "rest",
            [5, *whole.token_ids[:half]],
            Sampling(max_new_tokens=64 - half, seed=seed, drawn=half),
            deadline_seconds=PATIENCE,
        )
        assert rest.token_ids == whole.token_ids[half:]
        assert rest.finish_reason == whole.finish_reason
    await engine.stop()
