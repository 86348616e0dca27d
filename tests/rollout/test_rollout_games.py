"""Games in child processes under a real runner: a dead one is replaced, its episode replayed."""

from __future__ import annotations

from pathlib import Path

from tests.rollout.house import House, make_spec, training
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.environments import COUNTERS, GameWorkflow, PlayRules

NAUGHTY = "tests.workflow.environments.zoo:Naughty"
game: GameWorkflow


async def test_an_episode_whose_process_died_is_played_again(house: House, tmp_path: Path) -> None:
    global game
    game = GameWorkflow(
        NAUGHTY,
        args={"what": "die", "when": "step", "once": str(tmp_path / "once")},
        hosted=True,
        processes=2,  # for four trajectories: they are used again
        rules=PlayRules(history="latest", illegal="random_legal"),
    )
    spec = make_spec("one_turn", limits={"trajectory_retries": 1})
    spec["workflow"] = f"{__name__}:game"
    await house.prepare_raw(spec)
    await house.open_step()
    before = {event: COUNTERS.of(event, NAUGHTY) for event in ("faults", "starts", "resets")}  # type: ignore[arg-type]
    try:
        ended = await house.run(training())
    finally:
        await game.close()
    assert {event.state for event in ended.values()} == {common_pb.TRAJECTORY_STATE_COMPLETED}
    retried = [e for e in ended.values() if e.metrics.get("environment_retries")]
    assert len(retried) == 1  # the others did not hear of it
    gained = {event: COUNTERS.of(event, NAUGHTY) - was for event, was in before.items()}  # type: ignore[arg-type]
    assert gained == {"faults": 1, "starts": 3, "resets": len(ended) + 1}
    for event in ended.values():
        assert len(event.turns) == event.metrics["game_steps"]
        assert sorted(event.rewards) == ["checker", "solver"]
        assert sum(event.rewards.values()) == 0 or event.metrics["illegal_moves"]
