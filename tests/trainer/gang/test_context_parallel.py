"""Ranks that divide the tokens of each pass compute the gradient of one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer.gang.gang import Gangs
from services.trainer.learning.samples import Row
from services.trainer.settings import TrainerSettings
from services.trainer.state.training_state import StateStore, TrainingState
from tests.support.training import make_spec
from tests.trainer.gang.test_gang import alone, assert_close, rows_of, together
from tests.trainer.learning.test_pieces import conversation
from troupe.job import JobSpec, JobSpecError, parse_job


def divided_spec(tokenizer: Path, gang: int, divided: int, tokens: int, **sections: Any) -> JobSpec:
    values = make_spec(tokenizer, **sections).model_dump()
    values["policies"]["solver"]["trainer"] |= {
        "gang": gang,
        "context_parallel": divided,
        "forward_tokens": tokens,
    }
    return JobSpec.model_validate(values)


def steps_rows(spec: JobSpec, seed: int) -> list[Row]:
    """Return rows of steps: single answers, and turns of conversations."""
    rows = rows_of(spec, 6, seed)
    for number in range(2):
        rng = np.random.default_rng(number)
        for turn, one in enumerate(conversation(3, 20, 2 * seed + number, [1, 2, 3])):
            drawn = rng.normal(-4, 0.3, one.response_length).astype(np.float32)
            reward = float(number)
            rows.append(
                replace(
                    one,
                    behaviour=drawn,
                    reward=reward,
                    group_rewards=(0.0, 1.0),
                    group=f"conversation-{turn}",
                )
            )
    return rows


@pytest.fixture(scope="module")
def gangs(request: pytest.FixtureRequest) -> Iterator[dict[int, Gangs]]:
    some = {
        size: Gangs(TrainerSettings(trainer_device="cpu", gang_ranks=size, gang_timeout_seconds=90))
        for size in (2, 4)
    }
    yield some
    for one in some.values():
        one.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gang", "divided", "tokens", "algorithm"),
    [
        # Whole, in pieces, and with a loss that couples tokens of several ranks and pieces.
        (2, 2, 4096, {"kl_coefficient": 0.05, "entropy_coefficient": 0.01}),
        (2, 2, 10, {"kl_coefficient": 0.05}),
        (2, 1, 10, {"kl_coefficient": 0.05}),
        (2, 2, 10, {"loss": "gspo", "normalize": "sequence", "kl_coefficient": 0.05}),
        (4, 4, 12, {}),
        (4, 2, 12, {"loss": "gspo", "normalize": "sequence"}),
    ],
)
def test_ranks_divide_passes_as_if_one_device_had_made_them(
    tokenizer: Path,
    tmp_path: Path,
    gangs: dict[int, Gangs],
    gang: int,
    divided: int,
    tokens: int,
    algorithm: dict[str, Any],
) -> None:
    spec = divided_spec(tokenizer, gang, divided, tokens, algorithm=algorithm)
    ours = together(gangs[gang], spec, share_prefixes=True)
    one = alone(divided_spec(tokenizer, 1, 1, 4096, algorithm=algorithm), share_prefixes=True)
    if algorithm.get("kl_coefficient"):
        store = StateStore(tmp_path, "job", "solver")
        store.save(TrainingState(0, "a" * 32, one.snapshot()))
        for learner in (ours, one):
            learner.load_reference(store.load(0))
    try:
        for step in range(2):
            rows = steps_rows(spec, step)
            for learner in (ours, one):
                learner.accumulate(rows)
            mine, theirs = ours.apply(step), one.apply(step)
            assert mine.applied, mine.reason
            assert theirs.applied
            for name, value in theirs.metrics.items():
                if name != "train/seconds":
                    assert mine.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
            # In float32, cosines of positions round by their place in a vector.
            assert_close(ours, one, 1e-6)
    finally:
        ours.release()


def test_context_parallel_divides_the_gang(tokenizer: Path) -> None:
    with pytest.raises(JobSpecError, match="context_parallel is 3, which does not divide the 4"):
        parse_job(
            divided_spec(tokenizer, 4, 1, 64)
            .model_dump_json()
            .replace('"context_parallel":1', '"context_parallel":3')
        )
