"""The proof of a version by a gang of two gloo ranks equals one device's proof."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.gang.gang import Gangs
from services.trainer.gang.learner import GangLearner
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_adapted, load_model
from services.trainer.settings import TrainerSettings
from tests.support.training import tiny_config
from tests.trainer.gang.test_gang import gang_spec, rows_of, together
from troupe.checkpoints.proof import Proven
from troupe.job import JobSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def gangs() -> Iterator[Gangs]:
    settings = TrainerSettings(
        trainer_device="cpu", gang_ranks=2, gang_timeout_seconds=120, gang_start_seconds=900
    )
    some = Gangs(settings)
    yield some
    some.close()


def noted(gang: GangLearner, patch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Return the gang's orders from now on, and whether they name a file."""
    orders: list[tuple[str, bool]] = []
    order = gang._gang.order

    def note(name: str, *arguments: Any, **options: Any) -> Any:
        orders.append((name, "path" in options))
        return order(name, *arguments, **options)

    patch.setattr(gang._gang, "order", note)
    return orders


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_gang_proves_what_one_device_does(
    tokenizer: Path, gangs: Gangs, dtype: str, lora: bool
) -> None:
    """For sharded weights, experts among them, and for adapters and their base."""
    mixture = {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4}
    config = tiny_config(**mixture, num_experts_per_tok=2)
    model = {"config": config, "tokenizer": str(tokenizer), "dtype": dtype}
    values = gang_spec(tokenizer, model=model).model_dump()
    if lora:
        values["policies"]["solver"]["lora"] = {"rank": 3, "alpha": 6}
    spec = JobSpec.model_validate(values)
    gang = together(gangs, spec, double=False)
    own, cpu = spec.policies["solver"], torch.device("cpu")
    whole = (
        load_adapted("solver", own, spec.seed, cpu)
        if lora
        else load_model("solver", own, spec.seed)
    )
    one = Learner(whole, spec, "solver")
    for step in range(2):
        one.restore(gang.weights(), gang.moments())
        whats: tuple[Proven, ...] = ("published", "base") if lora else ("published",)
        for what in whats:
            ours, theirs = gang.proof((), what), one.proof((), what)
            assert ours is not None
            assert theirs is not None
            assert ours.ids == theirs.ids
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
            assert ours.allowed == pytest.approx(theirs.allowed, rel=0.5)
            theirs.check(ours.logprobs)
        # The proof uses the gathered tensors: nothing is gathered for it.
        with pytest.MonkeyPatch.context() as patch:
            orders = noted(gang, patch)
            published = gang.published()
            again, one_pass = gang.proof((), "published"), not lora
            assert orders == [("gather", True), ("prove", one_pass)]
            theirs = one.proof((), "published")
            assert again is not None
            assert theirs is not None
            assert again.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        gang.accumulate(rows_of(gang_spec(tokenizer), 6, step))
        assert gang.apply(step).applied
        if not lora:  # these tensors are not the proven ones
            stale, new = again.logprobs, gang.proof((), "published")
            assert new is not None
            assert new.logprobs != pytest.approx(stale, abs=1e-5)
            file = published.path  # type: ignore[attr-defined]
            assert file.exists()
            del published
            assert not file.exists()
    gang.release()
