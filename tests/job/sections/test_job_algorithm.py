"""`algorithm`: valid combinations, and refusals with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.training import make_spec
from troupe.algorithms.traits import LOSS_TRAITS
from troupe.job import JobSpec


def _pipeline(mode: str) -> dict[str, Any]:
    return {"mode": mode, "steps": 10, "queries_per_step": 2}


@pytest.mark.parametrize(
    ("algorithm", "mode", "message"),
    [
        ({"advantage": "reinforce_plus_plus"}, "micro_batch", "use pipeline.mode `sync`"),
        ({"loss": "cispo", "correction": "truncated"}, "async", "choose `masked`"),
        ({"normalize_per_agent": False}, "sync", "a baseline is of one agent anyway"),
        ({"constant_tokens": 8}, "sync", "without effect with normalize `token`"),
        ({"correction": "none", "loss": "gspo"}, "async", "needs a correction"),
        ({"rae_decay": 1.0}, "sync", "less than 1"),
        (
            {"advantage": "gea"},
            "sync",
            "is not one of grpo, dr_grpo, rloo, maxrl, reinforce_plus_plus, rae, gigpo, hgpo, gae",
        ),
        ({"critic": {}}, "sync", "without effect with advantage `grpo`"),
        ({"advantage": "gae", "group_by": "turn"}, "sync", "cut an agent's turns apart"),
        ({"advantage": "gae", "normalize_per_agent": False}, "sync", "a baseline is of one agent"),
        ({"advantage": "gae", "critic": {"gamma": 0}}, "sync", "greater than 0"),
        ({"advantage": "gae", "critic": {"observes": "team"}}, "sync", "at least two agents"),
        ({"advantage": "gae", "baseline_weight": "trajectory"}, "sync", "no baseline over"),
        ({"advantage": "hgpo", "baseline_weight": "trajectory"}, "sync", "no baseline over"),
        ({"advantage": "gigpo", "group_by": "turn"}, "sync", "choose `agent` or `query`"),
        ({"step_groups": {"history": 1}}, "sync", "choose `gigpo` or `hgpo`"),
        ({"advantage": "gae", "group_by": "query"}, "sync", "cut an agent's turns apart"),
        ({"columns": ["state"]}, "sync", "advantage `grpo` reads none"),
        ({"advantage": "a.b:c", "columns": ["no name"]}, "sync", "does not name a column"),
        ({"dual_clip": 3.0, "loss": "cispo"}, "sync", "choose `ppo_clip` or `gspo`"),
        ({"dual_clip": 1.1}, "sync", "is not above 1 \\+ clip_high"),
        ({"dual_clip": 3.0}, "async", "replaces the clip of loss"),
        ({"kl_in": "reward"}, "sync", "while kl_coefficient is 0"),
        ({"advantage": "gae", "critic": {"episodes": "team"}}, "sync", "a policy of its own"),
        ({"epochs": 2}, "micro_batch", "algorithm.epochs: several updates need all samples"),
        ({"minibatches": 2}, "micro_batch", "algorithm.minibatches: several updates need all"),
        ({"epochs": 2}, "async", "choose `recomputed`"),
    ],
)
def test_algorithm_settings_that_exclude_each_other_are_refused(
    algorithm: dict[str, Any], mode: str, message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        make_spec(Path("t"), algorithm=algorithm, pipeline=_pipeline(mode))


@pytest.mark.parametrize(
    ("algorithm", "mode", "correction"),
    [
        ({}, "sync", "none"),
        ({}, "async", "truncated"),
        ({"loss": "dppo_mask"}, "async", "masked"),
        ({"loss": "gspo", "correction": "sequence_masked"}, "async", "sequence_masked"),
        ({"advantage": "reinforce_plus_plus"}, "async", "truncated"),
    ],
)
def test_the_correction_in_force_follows_from_mode_and_loss(
    algorithm: dict[str, Any], mode: str, correction: str
) -> None:
    spec = make_spec(Path("t"), algorithm=algorithm, pipeline=_pipeline(mode))
    assert spec.correction == correction


def test_a_job_with_a_further_loss_is_checked_by_the_traits_of_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if `cispo` were another loss that is clipped as PPO's is."""
    algorithm = {"loss": "cispo", "dual_clip": 3.0}
    with pytest.raises(ValidationError, match="without effect with loss `cispo`"):
        make_spec(Path("t"), algorithm=algorithm, pipeline=_pipeline("sync"))
    monkeypatch.setitem(LOSS_TRAITS, "cispo", LOSS_TRAITS["ppo_clip"])  # type: ignore[arg-type]
    assert make_spec(Path("t"), algorithm=algorithm, pipeline=_pipeline("sync"))
    plain = make_spec(Path("t"), algorithm={"loss": "cispo"}, pipeline=_pipeline("async"))
    assert plain.correction == "truncated"
    for settings, message in (
        (algorithm, "replaces the clip of loss `cispo`.*loss `gspo`"),
        ({"loss": "cispo", "epochs": 2}, "loss `cispo` is not clipped against `behaviour`"),
        ({"loss": "gspo", "correction": "truncated"}, "loss `ppo_clip` or `cispo`, or old"),
    ):
        with pytest.raises(ValidationError, match=message):
            make_spec(Path("t"), algorithm=settings, pipeline=_pipeline("async"))


def test_a_users_own_loss_gets_the_checks_that_hold_for_any_loss() -> None:
    own: dict[str, Any] = {"loss": "mine.losses:bounded"}
    spec = make_spec(Path("t"), algorithm={**own, "dual_clip": 3.0}, pipeline=_pipeline("async"))
    assert spec.correction == "masked"
    assert spec.algorithm.learns_without_advantages
    truncated = {**own, "correction": "truncated"}
    with pytest.raises(ValidationError, match="would do it again"):
        make_spec(Path("t"), algorithm=truncated, pipeline=_pipeline("async"))


def test_a_team_critic_reads_one_vocabulary_whenever_it_was_written() -> None:
    algorithm = {"advantage": "gae", "critic": {"observes": "team"}}
    spec = make_spec(Path("t"), policies=("row", "column"), algorithm=algorithm)
    assert spec.algorithm.value_function == spec.algorithm.critic
    deterministic = {**_pipeline("sync"), "deterministic": True}
    with pytest.raises(ValidationError, match="may depend on time"):
        make_spec(Path("t"), policies=("a", "b"), algorithm=algorithm, pipeline=deterministic)
    values = spec.model_dump()
    values["policies"]["row"]["model"]["tokenizer"] = "another"
    with pytest.raises(ValidationError, match="of policies 'column' and 'row' differ"):
        type(spec).model_validate(values)


def test_several_updates_against_recomputed_log_probs_take_any_correction() -> None:
    several = {"epochs": 2, "minibatches": 2, "old_logprobs": "recomputed"}
    for loss in ("ppo_clip", "cispo"):
        algorithm = {**several, "loss": loss, "correction": "truncated"}
        spec = make_spec(Path("t"), algorithm=algorithm, pipeline=_pipeline("async"))
        assert spec.algorithm.updates == 4


def test_the_constant_is_the_longest_response_that_an_agent_may_give() -> None:
    agents = {
        "solver": {"policy": "solver", "sampling": {"max_new_tokens": 40}},
        "critic": {"policy": "solver", "sampling": {"max_new_tokens": 9}},
    }
    spec = make_spec(Path("t"), agents=agents, algorithm={"normalize": "constant"})
    assert spec.constant_tokens("solver") == 40
    own = {"normalize": "constant", "constant_tokens": 5}
    assert make_spec(Path("t"), agents=agents, algorithm=own).constant_tokens("solver") == 5


@pytest.mark.parametrize(
    "optimizer",
    [{"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": 1e-300}, {"lr": 1e300}],
)
def test_optimizer_settings_that_give_no_finite_numbers_are_refused(
    tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match=next(iter(optimizer))):
        make_spec(tmp_path, optimizer=optimizer)


@pytest.mark.parametrize("field", ["clip_high", "correction_cap"])
def test_bounds_that_single_precision_cannot_hold_are_refused(tmp_path: Path, field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        make_spec(tmp_path, algorithm={field: 1e308})


def test_names_may_not_end_with_a_line_break(tmp_path: Path) -> None:
    values = make_spec(tmp_path).model_dump()
    with pytest.raises(ValidationError, match="names are lower-case"):
        JobSpec.model_validate(values | {"agents": {"solver\n": {"policy": "solver"}}})
    with pytest.raises(ValidationError, match="must look like"):
        JobSpec.model_validate(values | {"workflow": "nowhere:play\n"})
