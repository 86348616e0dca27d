"""The command line of a server of our own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from transformers import PretrainedConfig

from services.rollout.engines.sglang.lora import arguments
from troupe.job import PolicySpec

# Kernels whose results do not depend on the batch, and sampling by each request's own seed.
DETERMINISTIC: Final = "--enable-deterministic-inference"


def write_config(config: PretrainedConfig, architecture: str, directory: Path) -> Path:
    """A directory that SGLang takes for a model without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config.architectures = [architecture]
    config.save_pretrained(directory)
    return directory


def command(
    spec: PolicySpec,
    source: str,
    port: int,
    max_context: int,
    *,
    deterministic: bool = False,
    name: str = "",
    targets: Sequence[str] = (),
) -> list[str]:
    """Arguments to launch a server of `spec` on loopback with the model at `source`.

    Random weights (`dummy`): the engine is STALE until the first update in any case. No
    tokenizer: token ids travel end to end. `name`: what the server calls itself. `targets`:
    layers of the policy's adapter. The job's own `launch` arguments come last and win.
    """
    engine = spec.engine
    revision = ["--revision", spec.language_model.revision] if spec.language_model.revision else []
    return [
        engine.python or sys.executable,
        "-m",
        "sglang.launch_server",
        *("--model-path", source),
        *revision,
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        *("--dtype", spec.language_model.dtype),
        *("--load-format", "dummy"),
        *("--context-length", str(max_context)),
        *("--max-running-requests", str(engine.max_running)),
        "--skip-tokenizer-init",
        *(["--served-model-name", name] if name else []),
        *([DETERMINISTIC] if deterministic else []),
        *arguments(spec, targets),
        *engine.launch,
    ]
