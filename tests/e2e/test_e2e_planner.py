"""A running job is measured: its profile, a plan from it, and hints about its split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.workloads.tokenizer import save_tokenizer
from troupe.client import AsyncClient, MetricsLogged, Notice
from troupe.client.cli.app import main
from troupe.cluster import ClusterSettings, EmbeddedCluster
from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition, InvalidArgument
from troupe.twin.profile import JobProfile

PACE = {
    "prefill_tokens_per_second": 20_000,
    "decode_seconds": 0.01,
    "decode_seconds_per_turn": 0.0005,
    "response_tokens_mean": 40,
    "response_tokens_sigma": 0.5,
    "backward_tokens_per_second": 50_000,
    "step_seconds": 0.05,
    "load_seconds": 0.01,
}


def job(directory: Path, **policy: Any) -> dict[str, Any]:
    """Conversations on one simulated engine that runs few turns at once; trainers are fast."""
    vocabulary = save_tokenizer(directory / "tokenizer", ends=False)
    return {
        "name": "measured",
        "workflow": "benchmarks.workloads.plain_turns:talk",
        "tasks": {
            "source": "benchmarks.workloads.plain_turns:Queries",
            "args": {"turns": 3, "words": 4},
        },
        "agents": {"player": {"policy": "solver", "sampling": {"max_new_tokens": 120}}},
        "policies": {
            "solver": {
                "model": {
                    "config": {"model_type": "qwen3", "vocab_size": vocabulary},
                    "tokenizer": str(directory / "tokenizer"),
                },
                "engine": {"max_running": 4, "max_context": 2048},
                "simulated": {**PACE, **policy},
            }
        },
        "pipeline": {
            "steps": 6,
            "queries_per_step": 8,
            "group_size": 4,
            "micro_batch_samples": 16,
            "mode": "micro_batch",
        },
        "evaluation": {"queries": 0},
        "limits": {"max_concurrent_trajectories": 32},
        "logging": {"tensorboard": False},
    }


@pytest.mark.slow
async def test_a_job_that_ran_is_planned_from_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = job(tmp_path)
    settings = ClusterSettings(data_dir=tmp_path / "data", panel=False)
    async with (
        EmbeddedCluster(settings) as cluster,
        AsyncClient(cluster.state.orchestrator_address) as client,
    ):
        handle = await client.submit(JobSpec.model_validate(values))
        await handle.wait(timeout=300)
        profile = await handle.profile()
        assert profile.steps == 6
        assert profile.turns["player"].mean == pytest.approx(3, rel=0.01)
        assert profile.responses["player"].mean == pytest.approx(40, rel=0.2)
        # No turn reads again what its conversation held before.
        assert profile.prompts["player"].quantile(0.9) < 100
        speed = profile.policies["solver"].engine.speed()
        assert speed is not None
        assert 1 < speed.concurrency <= 4
        step = speed.decode_seconds + speed.decode_seconds_per_turn * speed.concurrency
        # Machines add to the simulated time; nothing is faster.
        assert 0.8 * (0.01 + 0.0005 * speed.concurrency) < step < 0.1
        assert profile.policies["solver"].trained_tokens_per_second > 0
        assert profile.policies["solver"].queue_seconds.mean > 0
        info = await handle.info()
        assert "one more engine for `solver` would shorten the step by about" in info.split_hint
        assert info.split_hint.startswith("trainers idle")
        assert info.metrics["split/gain/engine/solver"] > 0.2
        rows = [one.values async for one in handle.watch() if isinstance(one, MetricsLogged)]
        measured = ["split/trainers_idle" in one for one in rows]
        # Not of the first step, nor before three others.
        assert not any(measured[:3])
        assert measured[-1]
        notices = [one.text async for one in handle.watch() if isinstance(one, Notice)]
        assert sum("one more engine for `solver`" in one for one in notices) == 1
        path = tmp_path / "profile.json"
        path.write_text(profile.to_json())
        again = await client.submit(JobSpec.model_validate(values | {"name": "unmeasured"}))
        await again.pause()
        with pytest.raises(FailedPrecondition, match="nothing is measured yet"):
            await again.profile()
        await again.cancel()
    text = tmp_path / "job.yaml"
    text.write_text(yaml.safe_dump(values))
    command = ["plan", str(text), "--devices", "6xSim-8GB", "--tflops", "1"]
    command += ["--gigabytes-per-second", "1", "--json"]
    assert main([*command, "--profile", str(path)]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert any("trajectories of 6 steps" in one for one in planned["measured"])
    # A step waits for engines.
    assert planned["best"]["engine_devices"] > planned["best"]["training_devices"]
    values["agents"]["second"] = values["agents"]["player"]
    other = JobSpec.model_validate(values)
    with pytest.raises(InvalidArgument, match="another job"):
        JobProfile.of_json(path.read_text()).check(other)
