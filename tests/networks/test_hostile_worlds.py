"""Every error of an environment's constructor is a fault of the job's field, wherever it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from services.rollout.networks.arena import Arena
from services.trainer.compute import Compute
from services.trainer.networks import learner as tables
from services.trainer.networks.learner import table_of
from tests.networks.hostile_worlds import ERRORS
from troupe.job import JobSpec
from troupe.outcomes import described, type_name
from troupe.rpc.errors import InvalidArgument
from troupe.user_code import UserCodeExit

TWO_STEP = Path(__file__).parents[2] / "examples" / "particles" / "two_step.yaml"


def job(source: str, **args: Any) -> JobSpec:
    spec = yaml.safe_load(TWO_STEP.read_text())
    spec["environment"] = {"source": f"tests.networks.hostile_worlds:{source}", "args": args}
    return JobSpec.model_validate(spec)


@pytest.mark.parametrize("number", range(len(ERRORS)), ids=lambda n: type_name(ERRORS[n]))
def test_whatever_a_factory_raises_is_the_jobs_fault(number: int) -> None:
    spec = job("raises", number=number)
    for make in (lambda: table_of(spec, "team"), lambda: Arena.open(spec, 1)):
        with pytest.raises(InvalidArgument) as refused:
            make()
        assert refused.value.field == "environment.source"
        if type_name(ERRORS[number]) not in ("RecursionError", "MemoryError"):
            assert described(ERRORS[number], 200)[:40] in refused.value.message


@pytest.mark.parametrize("source", ["nothing", "BadAgents"])
def test_a_source_that_is_not_an_environment_is_refused(source: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        table_of(job(source), "team")
    assert refused.value.field == "environment.source"


def test_an_environment_that_does_not_close_can_be_used() -> None:
    spec = job("ClosesBadly")
    assert len(table_of(spec, "team").agents) == 2
    Arena.open(spec, 1).close()


def test_an_environment_that_hangs_frees_the_trainer_s_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "_MAKE_SECONDS", 0.2)
    with pytest.raises(InvalidArgument, match=r"did not end within 0\.2 s") as refused:
        table_of(job("hangs"), "team")
    assert refused.value.field == "environment.source"


async def test_the_trainers_thread_raises_nothing_but_exceptions() -> None:
    compute = Compute(1, torch.device("cpu"))

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(UserCodeExit, match="SystemExit: 3"):
        await compute.run(leave)
    assert await compute.run(lambda: 7) == 7
    compute.close()
