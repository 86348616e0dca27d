"""A rank that is killed in each order of a step, while a state is written behind the steps, and
while its policy is suspended or resumed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from services.trainer.gang.gang import Gang
from services.trainer.state.training_state import StateStore
from tests.trainer.gang.test_gang import gang_spec
from tests.trainer.gang.test_gang_steps import (
    assert_close,
    copied,
    gang_of,
    gone,
    ranks,
    step,
    violations,
)
from tests.trainer.stage import Trainer, TrainingStage
from troupe.job import JobSpec
from troupe.rpc import Aborted, TroupeError

pytestmark = pytest.mark.slow

# A step far larger than the effect of rounding on Adam.
_OPTIMIZER = {"lr": 1e-3, "eps": 1e-3}


class Killer:
    """Kills a rank once, as soon as an order of this name is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order = ""
        self.killed = 0
        give = Gang.order

        def order(gang: Gang, name: str, *args: Any, **header: Any) -> Any:
            if name == self.order:
                self.order = ""
                self.killed += 1
                ranks(os.getpid())[self.killed % 2].send_signal(signal.SIGKILL)
            return give(gang, name, *args, **header)

        monkeypatch.setattr(Gang, "order", order)


@pytest.fixture
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directories in which gangs have files."""
    root = tmp_path / "memory"
    root.mkdir()
    monkeypatch.setattr("troupe.disks.memory_root", lambda: root)
    return root


def left_over(stage: TrainingStage, rooms: Path) -> list[str]:
    """Return the files that belong to no living gang and no version."""
    states = stage.root / "runs" / stage.job_id / "state/solver"
    files = [path for room in rooms.iterdir() for path in room.iterdir() if path.name != "leader"]
    unfinished = [path for path in states.iterdir() if path.name.startswith(".")]
    waiting = [key for key in stage.transfer.keys("") if "/training@" in key]
    return [*map(str, files), *map(str, unfinished), *waiting]


async def test_a_rank_killed_in_any_order_of_a_step_costs_that_step_only(
    stage: TrainingStage, rooms: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, one = (gang_spec(stage.tokenizer, size, optimizer=_OPTIMIZER) for size in (2, 1))
    job, alone = await stage.sibling()
    await alone.bind(one)
    trainer, killer = await stage.trainer(gang_ranks=2), Killer(monkeypatch)
    await trainer.bind_again(two)
    for number, order in enumerate(
        ("discard", "accumulate", "complete", "apply", "gather", "save")
    ):
        _, expected = await step(job, alone, number, one)
        await stage.open(number, version=number)
        await stage.play(stage.first_model(two), step=number, version=number)
        before, killer.order = gang_of(os.getpid()), order
        with pytest.raises(Aborted) as lost:
            await trainer.run(number, number)
        assert lost.value.kind == "gang_lost", order
        await gone(before)
        commit = await trainer.run(number, number)
        assert (commit.num_samples, commit.metrics["samples"]) == (8, 8), order
        assert commit.weights.version == number + 1
        assert_close(copied(stage, commit.weights), expected)
        assert left_over(stage, rooms) == [], order
        assert len(os.listdir(rooms)) == 1, order
    assert killer.killed == 6
    assert await violations(stage) == []
    await trainer.release()


@pytest.mark.parametrize("order", ["copy", "write_copy", "copy_written"])
async def test_a_rank_killed_while_a_state_is_written_costs_no_committed_step(
    stage: TrainingStage, rooms: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """The steps since the previous state are computed again, bit for bit, from the kept rows."""
    spec = gang_spec(stage.tokenizer, 2, optimizer=_OPTIMIZER, state={"every": 2})
    trainer, killer = await stage.trainer(gang_ranks=2), Killer(monkeypatch)
    await trainer.bind_again(spec)
    versions = trainer.worker.bindings.bound[(stage.job_id, "solver")].versions
    states = StateStore(stage.root / "runs", stage.job_id, "solver")
    await step(stage, trainer, 0, spec)
    killer.order = order
    await step(stage, trainer, 1, spec)
    await asyncio.to_thread(versions.durability.settle)
    assert killer.killed == 1
    assert states.versions() == [0], "what was half written has no name"
    await stage.open(2, version=2)
    await stage.play(stage.first_model(spec), step=2, version=2)
    commit = await trainer.run(2, 2)
    assert commit.metrics["train/state_recomputed_steps"] == 2
    assert not versions.pack().document["rounded"], "the committed weights, bit by bit"
    await step(stage, trainer, 3, spec)
    await step(stage, trainer, 4, spec)
    await asyncio.to_thread(versions.durability.settle)
    assert max(states.versions()) >= 3
    states.load(max(states.versions()))
    assert left_over(stage, rooms) == []
    assert await violations(stage) == []
    await trainer.release()
    assert max(states.versions()) == 5, "a policy that leaves has its state on disk"


async def half(stage: TrainingStage, trainer: Trainer, spec: JobSpec) -> asyncio.Task[Any]:
    """Half of step 0 is in the gradients."""
    for query, trajectory, samples in stage.rollouts(stage.first_model(spec))[:4]:
        await stage.append(query, trajectory, samples)
    running = asyncio.create_task(trainer.run(0, 0))
    await trainer.trained(4)
    return running


@pytest.mark.parametrize("order", ["suspend", "resume"])
async def test_a_rank_killed_in_a_swap_costs_the_step_that_it_was_in(
    stage: TrainingStage, rooms: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    two, one = (gang_spec(stage.tokenizer, size, optimizer=_OPTIMIZER) for size in (2, 1))
    job, alone = await stage.sibling()
    await alone.bind(one)
    _, expected = await step(job, alone, 0, one)
    trainer, killer = await stage.trainer(gang_ranks=2), Killer(monkeypatch)
    await trainer.bind_again(two)
    await stage.open()
    running = await half(stage, trainer, two)
    before, killer.order = gang_of(os.getpid()), order
    with pytest.raises(Aborted) as lost:
        await trainer.resume(two, await trainer.suspend())
    assert lost.value.kind == "gang_lost"
    with pytest.raises(TroupeError):
        await running
    await gone(before)
    assert await trainer.statuses() == []
    assert left_over(stage, rooms) == []
    await trainer.bind_again(two)
    for query, trajectory, samples in stage.rollouts(stage.first_model(two))[4:]:
        await stage.append(query, trajectory, samples)
    commit = await trainer.run(0, 0)
    assert (commit.num_samples, commit.metrics["samples"]) == (8, 8)
    assert_close(copied(stage, commit.weights), expected)
    assert left_over(stage, rooms) == []
    assert await violations(stage) == []
