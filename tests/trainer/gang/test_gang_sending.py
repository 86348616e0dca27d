"""Versions of a gang of two gloo ranks in servers: one gather for any number of servers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.interpreters import sglang_double
from tests.trainer.gang.test_gang import gang_spec
from tests.trainer.stage import TrainingStage
from tests.trainer.test_sending import trained
from tests.trainer.test_sending_waves import made as made  # a fixture
from tests.trainer.test_sending_waves import reports, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


async def test_a_gang_gathers_a_version_once_for_its_publication_and_all_servers(
    stage: TrainingStage, tmp_path: Path, made: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = gang_spec(stage.tokenizer)
    trainer = await stage.trainer(trainer_device="cpu", gang_ranks=2, gang_start_seconds=900)
    first = await trainer.bind_again(spec)
    binding = trainer.worker.bindings.find((stage.job_id, "solver"))
    gang = binding.learner._gang
    order, orders = gang.order, Counter[str]()

    def counted(name: str, *arguments: Any, **options: Any) -> Any:
        orders[name] += 1
        return order(name, *arguments, **options)

    monkeypatch.setattr(gang, "order", counted)
    async with serving(stage, spec, first, sglang_double(tmp_path), [()] * 3) as (policy, engines):
        for version in (1, 2):
            orders.clear()
            made.clear()
            ref = await trained(stage, trainer, spec, version - 1)
            await policy.update(ref)
            assert reports(engines) == [(version, "broadcast", 0)] * 3
            assert orders["gather"] == 1
            assert "send" not in orders
            assert made["tensors"] == len(stage.weights(ref))
            assert (made["groups"], made["members"]) == ((1, 3) if version == 1 else (0, 0))
        # A server that loads the version later costs none, either.
        engines[0].distrust("its weights were lost")
        await engines[0].update_weights(ref, stage.transfer)
        assert reports(engines) == [(2, "broadcast", 0)] * 3
        assert orders["gather"] == 1
    assert not binding.learner.lost
