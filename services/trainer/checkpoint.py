"""Checkpoints that `transformers` loads: `{data_dir}/{job}/checkpoints/{policy}/v{version}`."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from services.trainer.disk import reported, sync_directory, sync_file
from troupe.transfer.checksum import dtype_name

_NAME = re.compile(r"^v(\d+)$")


def checkpoint_path(root: Path, job_id: str, policy: str, version: int) -> Path:
    """Where a checkpoint is, or would be."""
    return root / job_id / "checkpoints" / policy / f"v{version}"


def save_checkpoint(
    path: Path, model: Any, weights: Mapping[str, torch.Tensor], tokenizer: Any, *, keep: int
) -> int:
    """Write `weights` in the format of `model` with its tokenizer; returns the size in bytes.

    A checkpoint that is there already stays as it is. Of its siblings the `keep` newest stay.
    Raises ResourceExhausted ("storage_full") or FailedPrecondition ("storage_unwritable");
    then no half checkpoint is left and older ones are untouched.
    """
    if not path.is_dir():
        temp = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
        with reported(path.parent, "a checkpoint"):
            try:
                temp.mkdir(parents=True)
                model.save_pretrained(temp, state_dict=_with_tied(model, weights))
                _name_dtype(temp / "config.json", weights)
                tokenizer.save_pretrained(temp)
                for file in temp.rglob("*"):
                    if file.is_file():
                        sync_file(file)
                temp.rename(path)
                sync_directory(path.parent)
            finally:
                shutil.rmtree(temp, ignore_errors=True)
    _prune(path.parent, keep)
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _with_tied(model: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add the names that share another one's tensor: save_pretrained expects all of them."""
    state = model.state_dict()
    by_place = {state[name].data_ptr(): name for name in weights if name in state}
    complete = dict(weights)
    for name, tensor in state.items():
        if name not in complete and tensor.data_ptr() in by_place:
            complete[name] = weights[by_place[tensor.data_ptr()]]
    return complete


def _name_dtype(config: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Say in the configuration what the weights are; it speaks of the model in training."""
    dtypes = {dtype_name(t.dtype) for t in weights.values() if t.is_floating_point()}
    values = json.loads(config.read_text())
    values["dtype"] = dtypes.pop()
    config.write_text(json.dumps(values, indent=2) + "\n")


def _prune(directory: Path, keep: int) -> None:
    found = sorted(
        (int(match[1]), path) for path in directory.iterdir() if (match := _NAME.match(path.name))
    )
    for _, path in found[:-keep]:
        shutil.rmtree(path, ignore_errors=True)
