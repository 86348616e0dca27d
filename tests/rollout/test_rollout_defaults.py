"""A rollout worker's defaults for settings that a job leaves to its devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, PretrainedConfig

from services.rollout.engines.embedded.attention import RaggedCache
from services.rollout.engines.embedded.batcher import default_room
from services.rollout.engines.embedded.cache import SPARE
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.servers.interface import Launch
from services.rollout.engines.sglang.server import SglangServer
from services.rollout.engines.weights import skeleton
from services.rollout.job_setup import with_defaults
from tests.rollout.engines.asking import ask
from tests.rollout.engines.models import CONFIG, make_model, publish, transfer_in
from tests.support.readme import readme_job
from troupe.job import JobSpec, PolicySpec
from troupe.scheduling.defaults import context_of, described_device

GIB = 1 << 30


def configuration(**values: Any) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model("qwen3", **values)
    return config


# By policy of the README's job: the configuration of a checkpoint of this size.
CHECKPOINTS = {
    "big": {"hidden_size": 2560, "max_position_embeddings": 40_960, "dtype": "bfloat16"},
    "small": {"hidden_size": 1024, "max_position_embeddings": 40_960, "dtype": "bfloat16"},
}


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_servers_of_the_readmes_job_on_80_gb(replicas: int) -> None:
    raw = yaml.safe_load(readme_job())
    for policy in raw["policies"].values():
        policy["engine"] |= {"replicas": replicas, "python": "/opt/sglang/bin/python"}
    spec = with_defaults(JobSpec.model_validate(raw), 79 * GIB, embedded=False)
    assert spec.limits.turn_limit == 600
    lines = []
    for number in range(2 * replicas):
        name = ("big", "small")[number % 2]
        policy = spec.policies[name]
        config = configuration(**CHECKPOINTS[name])
        model = policy.language_model.resolved(config)
        context = context_of(policy.engine.max_context, config.max_position_embeddings)
        policy = policy.model_copy(update={"model": model})
        assert model.path is not None
        lines.append(
            SglangServer.command(
                Launch(policy, model.path, 30_000 + number, context, name=f"troupe-{number}")
            )
        )
    for number, line in enumerate(lines):
        path = ("Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B")[number % 2]
        wanted = (
            f"/opt/sglang/bin/python -m sglang.launch_server --model-path {path} "
            f"--host 127.0.0.1 --port {30_000 + number} --dtype bfloat16 --load-format dummy "
            "--context-length 32768 --max-running-requests 256 --skip-tokenizer-init "
            f"--served-model-name troupe-{number}"
        )
        assert line == wanted.split()


def test_engines_on_cpus_keep_their_defaults() -> None:
    raw = yaml.safe_load(readme_job())
    raw["policies"]["small"]["engine"] = {"kind": "embedded"}
    raw["policies"]["big"]["engine"]["max_running"] = 48
    spec = JobSpec.model_validate(raw)
    bare = with_defaults(spec, None, embedded=False)
    assert [bare.policies[name].engine.running_limit for name in ("big", "small")] == [48, 64]
    assert bare.limits.turn_limit == 120
    # The job's own numbers win, and an embedded engine on the CPU of a machine with GPUs is slow.
    mixed = with_defaults(spec, 79 * GIB, embedded=False)
    assert [mixed.policies[name].engine.running_limit for name in ("big", "small")] == [48, 64]
    assert with_defaults(spec, 79 * GIB, embedded=True).policies["small"].engine.max_running == 256
    assert with_defaults(mixed, 23 * GIB, embedded=True) == mixed


@pytest.mark.parametrize("dtype", ["auto", None])
async def test_an_embedded_engine_serves_the_type_and_context_that_the_job_leaves_open(
    tmp_path: Path, dtype: str | None
) -> None:
    model = make_model(0).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    raw = {"model": {"path": str(tmp_path / "model"), "dtype": dtype}}
    engine = EmbeddedEngine("e0", "solver", PolicySpec.model_validate(raw))
    await engine.start()
    try:
        assert engine.max_context == CONFIG["max_position_embeddings"]
        if dtype is None:
            model = model.float()
        ref = publish(transfer := transfer_in(tmp_path), model, 0)
        await engine.update_weights(ref, transfer)
        answer = await ask(engine, "r", [5] * 250, max_new_tokens=100)
        assert len(answer.token_ids) == 6
    finally:
        await engine.stop()


def test_a_default_context_costs_no_cached_prefix() -> None:
    tiny = skeleton(AutoConfig.for_model(**CONFIG), "float32", "solver")
    room = default_room(tiny, 64)
    assert room > 2048
    cache = RaggedCache(tiny.config, torch.float32, running=64, max_context=room)
    assert cache.count == SPARE * 64
    assert default_room(tiny, 4096) == 2048


@pytest.mark.parametrize(
    ("memory", "said"),
    [(None, "CPU"), (0, "GPU"), (24 * GIB, "GPU"), (79 * GIB, "GPU of 72 GiB or more")],
)
def test_the_class_of_a_device_as_people_read_it(memory: int | None, said: str) -> None:
    assert described_device(memory) == said
