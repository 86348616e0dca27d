"""Settings of a valid job that have no effect are reported by path, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster import job_yaml
from troupe.job import JobSpec, parse_job
from troupe.job.compatibility import advice


def told(**over: Any) -> list[str]:
    """Return the paths and values about which advice is given."""
    spec = parse_job(job_yaml(**over))
    # With every default written out, as the orchestrator keeps it, it is the same job.
    assert advice(JobSpec.model_validate_json(spec.model_dump_json())) == advice(spec)
    return [line.partition(":")[0] for line in advice(spec)]


@pytest.mark.parametrize(
    ("over", "line"),
    [
        ({"pipeline__alpha": 3}, "pipeline.alpha = 3"),
        ({"pipeline__max_refills": 3}, "pipeline.max_refills = 3"),
        *(
            ({"pipeline__group_size": 1, "algorithm__advantage": name}, "pipeline.group_size = 1")
            for name in ("grpo", "dr_grpo", "rloo", "maxrl", "gigpo", "hgpo")
        ),
        ({"policies__solver__alpha": 1}, "policies.solver.alpha = 1"),
        ({"policies__solver__trainer": {"shard": "host"}}, "policies.solver.trainer.shard"),
        (
            {"policies__solver__optimizer": {"warmup_steps": 2}},
            "policies.solver.optimizer.warmup_steps = 2",
        ),
        (
            {"policies__solver__trainable": False, "policies__solver__trainer": {"gang": 2}},
            "policies.solver.trainer.gang = 2",
        ),
        (
            {"policies__solver__trainable": False, "policies__solver__alpha": 2},
            "policies.solver.alpha = 2",
        ),
        (
            {
                "policies__solver__trainable": False,
                "policies__solver__alpha": 2,
                "pipeline__mode": "async",
            },
            "policies.solver.alpha = 2",
        ),
        (
            {"policies__solver__trainable": False, "policies__solver__optimizer": {"lr": 0.5}},
            "policies.solver.optimizer.lr = 0.5",
        ),
        (
            {"policies__solver__engine": {"launch": ["--api-key", "secret"]}},
            "policies.solver.engine.launch",
        ),
        ({"evaluation__every": 5}, "evaluation.every = 5"),
        ({"evaluation__success": "team"}, "evaluation.success"),
    ],
)
def test_settings_without_effect_are_advised_against(over: dict[str, Any], line: str) -> None:
    assert told(**over) == [line]


@pytest.mark.parametrize(
    "over",
    [
        {},
        {"pipeline__mode": "async", "pipeline__alpha": 3, "policies__solver__alpha": 2},
        {"pipeline__dynamic_sampling": True, "pipeline__max_refills": 3},
        {"pipeline__group_size": 1, "algorithm__advantage": "rae"},
        {"pipeline__group_size": 1, "algorithm__kl_coefficient": 0.1},
        {"policies__solver__optimizer": {"warmup_steps": 1}},
        {"evaluation": {"queries": 4, "every": 5, "success": "team"}},
        {"evaluations": {"all": {"every": 5}}},
        {"policies__solver__trainable": False, "policies__solver__trainer": {"idle_seconds": 5}},
        {"policies__solver__engine": {"kind": "sglang", "launch": ["--page-size", "2"]}},
    ],
)
def test_settings_with_effect_are_not_advised_against(over: dict[str, Any]) -> None:
    assert told(**over) == []


def test_every_setting_without_effect_is_advised_against() -> None:
    trainer = {"gang": 2, "forward_tokens": 64}
    assert told(
        pipeline__alpha=3, policies__solver__trainable=False, policies__solver__trainer=trainer
    ) == [
        "pipeline.alpha = 3",
        "policies.solver.trainer.forward_tokens = 64",
        "policies.solver.trainer.gang = 2",
    ]
