"""Merging an exported LoRA adapter into its base model, in place."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from troupe.checkpoints.verifying import Lineage, digests
from troupe.rpc.errors import DataLoss, FailedPrecondition

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def is_adapter_folder(folder: Path) -> bool:
    """Whether the checkpoint in `folder` is a LoRA adapter."""
    return (folder / ADAPTER_FILES[0]).is_file()


def merge_in_place(folder: Path, base: str | Path | None = None) -> None:
    """Replace the adapter in `folder` by the merged model. Blocking; needs torch.

    `base`: path or hub id of the base; default: the one that the adapter names. It must be, bit for
    bit, the base that the adapter was trained on. Raises `FailedPrecondition` (kinds
    "torch_missing", "base_not_found"), `DataLoss` (kinds "base_mismatch", "checkpoint_corrupt");
    the adapter is then unchanged.
    """
    try:
        import torch
        import transformers  # noqa: F401
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise FailedPrecondition(
            f"merging needs {error.name}",
            kind="torch_missing",
            field="--merged",
            remedy="pip install 'troupe[trainer]', or export with --adapter.",
        ) from error
    from troupe.adapters import AdapterContent, merged
    from troupe.adapters.merge import distinct_tensors
    from troupe.checkpoints.format import CheckpointFormat
    from troupe.checkpoints.tensors import TensorsDoNotFit, load_causal_lm
    from troupe.transfer import checksum_of

    try:
        config = json.loads((folder / ADAPTER_FILES[0]).read_text(encoding="utf-8"))
        tensors = load_file(folder / ADAPTER_FILES[1])
    except (OSError, ValueError, SafetensorError) as error:
        raise DataLoss(
            f"the adapter cannot be read: {error}",
            kind="checkpoint_corrupt",
            field="file",
            value=folder,
            remedy="Export another version.",
        ) from error
    source = str(base or config.get("base_model_name_or_path") or "")
    dtype = next(iter(tensors.values())).dtype
    try:
        model: Any = load_causal_lm(source, dtype=dtype)
    except TensorsDoNotFit as error:
        raise DataLoss(
            f"the base is not a checkpoint of its model: {error}",
            kind="base_mismatch",
            field="--base",
            value=source,
            remedy=error.remedy,
        ) from error
    except Exception as error:
        raise FailedPrecondition(
            f"the base cannot be loaded: {str(error).splitlines()[0] if str(error) else error!r}",
            kind="base_not_found",
            field="--base",
            value=source,
            remedy="Name the base's directory with --base, or export with --adapter.",
        ) from error
    lineage = Lineage.read(folder)
    found = checksum_of(CheckpointFormat(model, dtype).of(distinct_tensors(model)))
    if lineage is not None and lineage.base_checksum not in ("", found):
        raise DataLoss(
            f"the base has checksum {found}; the adapter was trained on {lineage.base_checksum}",
            kind="base_mismatch",
            field="--base",
            value=source,
            remedy="Name the model that the job was trained on with --base.",
        )
    adapter = AdapterContent(
        found,
        int(config["r"]),
        float(config["lora_alpha"]),
        tuple(config["target_modules"]),
        bool(config.get("fan_in_fan_out")),
        tensors,
    )
    with torch.no_grad():
        model.load_state_dict(merged(distinct_tensors(model), adapter), strict=False)
    scratch = Path(tempfile.mkdtemp(prefix=".merging-", dir=folder))
    try:
        model.save_pretrained(scratch)
        for file in scratch.iterdir():
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for name in ADAPTER_FILES:
        (folder / name).unlink()
    if lineage is not None:
        replace(lineage, files=digests(folder)).write(folder)
