"""The model card of an exported checkpoint: what it is and where it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from troupe.checkpoints.verifying import Lineage

_NETWORK_USAGE = """```python
from troupe.networks.exported import ExportedNetwork

network = ExportedNetwork.read(".")
actor = network.actor(network.play(copies=16))
print(actor.sample(seed=0, explore=False).returns)
```

"""


def write_card(folder: Path, rewards: Mapping[str, float]) -> None:
    """Write a checkpoint's README.md (the model card) beside its weights.

    `rewards`: by metric name, of the step that made the version. Writes nothing for a
    checkpoint without a lineage file (`troupe.json`). Raises OSError.
    """
    lineage = Lineage.read(folder)
    if lineage is None:
        return
    adapter = (folder / "adapter_config.json").is_file()
    network = not adapter and _is_network(folder)
    head: dict[str, Any] = {
        "library_name": "troupe" if network else "peft" if adapter else "transformers",
        "pipeline_tag": "reinforcement-learning" if network else "text-generation",
        "tags": ["troupe", "reinforcement-learning", *(["lora"] if adapter else [])],
    }
    if lineage.base_model:
        head["base_model"] = lineage.base_model
    made = "the first weights" if lineage.step < 0 else f"step {lineage.step + 1}"
    rows = {
        "Job": f"{lineage.job} (`{lineage.job_id}`)",
        "Policy": lineage.policy,
        "Version": f"{lineage.version}, made by {made}",
        "Algorithm": lineage.algorithm,
        "Base model": lineage.base_model or "random weights",
        "Checksum as published": f"`{lineage.checksum}`",
        "Checksum of the base": f"`{lineage.base_checksum}`" if lineage.base_checksum else "",
    }
    rows |= {f"`{name}`": f"{value:.4g}" for name, value in sorted(rewards.items())}
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items() if value)
    # JSON is valid YAML, so the front matter needs neither a YAML library nor escaping by hand.
    front = "".join(f"{name}: {json.dumps(value)}\n" for name, value in head.items())
    what = "A LoRA adapter" if adapter else "A causal language model"
    what = "A small network" if network else what
    usage = _NETWORK_USAGE if network else ""
    (folder / "README.md").write_text(
        f"---\n{front}---\n\n# {lineage.job}: {lineage.policy} @ {lineage.version}\n\n"
        f"{what} trained with Troupe.\n\n{usage}| | |\n|---|---|\n{table}",
        encoding="utf-8",
    )


def _is_network(folder: Path) -> bool:
    """Whether the checkpoint is of a small network, which `troupe.networks.exported` loads."""
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return bool(described["model_type"] == "troupe_network")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def rewards_of(rows: Mapping[str, float]) -> dict[str, float]:
    """Select the rewards among a step's metrics."""
    return {n: v for n, v in rows.items() if n.startswith("reward") or n == "team_success"}


def rewards_in(metrics: Path, step: int) -> dict[str, float]:
    """The rewards of a step in a job's `metrics.jsonl`; empty if the file has none for it."""
    try:
        with metrics.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                if row.pop("step", None) == step:
                    return rewards_of(row)
    except (OSError, ValueError, AttributeError):
        pass
    return {}
