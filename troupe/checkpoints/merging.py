"""Merging an exported LoRA adapter into its base model, one tensor at a time."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from troupe.checkpoints.verifying import Lineage, digests
from troupe.rpc.errors import DataLoss, FailedPrecondition, TroupeError

if TYPE_CHECKING:
    import torch

    from troupe.checkpoints.adapters import AdapterContent
    from troupe.transfer.deferred import DeferredTensors

ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
# Starts a progress bar for a number of bytes; returns the function to call with each part done.
ByteBar = Callable[[str, int], Callable[[int], None]]


def is_adapter_folder(folder: Path) -> bool:
    """Return whether the checkpoint in `folder` is a LoRA adapter."""
    return (folder / ADAPTER_FILES[0]).is_file()


def whole_model(checkpoint: Path, copy: Path) -> Path:
    """Return the directory of a checkpoint's whole model: `checkpoint`, or the new directory `copy`
    with its adapter merged into the base that its job keeps, else into the base that it names.

    Raises like `merge_in_place`.
    """
    if not is_adapter_folder(checkpoint):
        return checkpoint
    shutil.copytree(checkpoint, copy)
    lineage, base = Lineage.read(copy), None
    if lineage is not None:
        # JOB/checkpoints/POLICY/VERSION, or JOB/best/POLICY/VERSION
        job = checkpoint.resolve() / "../../.."
        kept = (job / "checkpoints" / ".base" / lineage.base_checksum).resolve()
        base = kept if lineage.base_checksum and kept.is_dir() else None
    try:
        merge_in_place(copy, base)
    except TroupeError as error:
        # Only an export has this option.
        if error.field == "--base":
            error.field = "base"
            error.remedy = (
                "Take an export of the whole model: `troupe export JOB DIR --merged --base PATH`."
            )
        raise
    return copy


def merge_in_place(
    folder: Path,
    base: str | Path | None = None,
    progress: ByteBar = lambda what, total: lambda nbytes: None,
) -> None:
    """Replace the adapter in `folder` by the merged model. Blocking; needs torch.

    `base`: path or hub id of the base; default: the base that the adapter names. It must equal the
    base of the training bit for bit. One tensor of the base at a time is in memory.

    Raises `FailedPrecondition` (kinds "torch_missing", "base_not_found"), `DataLoss` (kinds
    "base_mismatch", "checkpoint_corrupt"), OSError; the adapter is then unchanged.
    """
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise FailedPrecondition(
            f"merging needs {error.name}",
            kind="torch_missing",
            field="--merged",
            remedy="`pip install 'troupe-rl[trainer]'`, or export with --adapter.",
        ) from error
    from troupe.checkpoints.adapters import AdapterContent, MergeMismatch
    from troupe.checkpoints.format import CheckpointFormat, FormatMismatch
    from troupe.checkpoints.reading import StoredTensors
    from troupe.checkpoints.writing import write_checkpoint
    from troupe.transfer.checksum import dtype_name

    try:
        config = json.loads((folder / ADAPTER_FILES[0]).read_text(encoding="utf-8"))
        tensors = dict(StoredTensors([folder / ADAPTER_FILES[1]]))
    except (OSError, ValueError) as error:
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
        model, stored = _opened(source)
    except FormatMismatch as error:
        raise _mismatch(source, f"is not a checkpoint of its model: {error}") from error
    except Exception as error:
        raise FailedPrecondition(
            f"the base cannot be loaded: {str(error).splitlines()[0] if str(error) else error!r}",
            kind="base_not_found",
            field="--base",
            value=source,
            remedy="Name the base's directory with --base, or export with --adapter.",
        ) from error
    lineage = Lineage.read(folder)
    form = CheckpointFormat(model, dtype)
    try:
        found = _checksum(form.of(stored), progress)
    except (OSError, ValueError) as error:
        raise _mismatch(source, f"is not a checkpoint of its model: {error}") from error
    if lineage is not None and lineage.base_checksum not in ("", found):
        raise _mismatch(
            source,
            f"has checksum {found}, but the adapter was trained on {lineage.base_checksum}",
        )
    adapter = AdapterContent(
        found,
        int(config["r"]),
        float(config["lora_alpha"]),
        tuple(config["target_modules"]),
        bool(config.get("fan_in_fan_out")),
        tensors,
    )
    scratch = Path(tempfile.mkdtemp(prefix=".merging-", dir=folder))
    try:
        model.save_pretrained(scratch, state_dict={})
        (scratch / "model.safetensors").unlink(missing_ok=True)
        settings = json.loads((scratch / "config.json").read_text(encoding="utf-8"))
        settings["dtype"] = dtype_name(dtype)
        (scratch / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        whole = form.of(_merged(stored, adapter, dtype))
        write_checkpoint(scratch, whole, progress("merging", whole.nbytes))
        for file in scratch.iterdir():
            file.replace(folder / file.name)
    except MergeMismatch as error:
        raise _mismatch(source, f"is not the adapter's base: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for name in ADAPTER_FILES:
        (folder / name).unlink()
    if lineage is not None:
        replace(lineage, files=digests(folder)).write(folder)


def _mismatch(source: str, problem: str) -> DataLoss:
    return DataLoss(
        f"the base {problem}",
        kind="base_mismatch",
        field="--base",
        value=source,
        remedy="Name the job's original model with --base.",
    )


def _opened(source: str) -> tuple[Any, DeferredTensors]:
    """Return the model of a checkpoint on the meta device, and its tensors by the model's names,
    which are read and converted on access.

    Raises FormatMismatch for tensors that are not the model's, else the errors of transformers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from troupe.checkpoints.format import ModelArrangement
    from troupe.checkpoints.reading import StoredTensors, checkpoint_folder, weight_files

    if not source:
        raise FileNotFoundError("the adapter does not name its base")
    folder = checkpoint_folder(source)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    tensors: Any
    if weight_files(folder)[0].is_file():
        tensors = StoredTensors.of_checkpoint(folder)
    else:  # pickled; mapped into memory
        files = sorted(folder.glob("pytorch_model*.bin"))
        if not files:
            raise FileNotFoundError(f"there are no weights in {folder}")
        read = (torch.load(file, mmap=True, weights_only=True) for file in files)
        tensors = {name: tensor for part in read for name, tensor in part.items()}
    layout = tensors.layout if isinstance(tensors, StoredTensors) else tensors
    arrangement = ModelArrangement.of(model, layout)
    arrangement.note_in(model)
    return model, arrangement.arranged(tensors)


def _checksum(tensors: DeferredTensors, progress: ByteBar) -> str:
    """Return the checksum of all tensors, of which one group at a time is in memory."""
    from troupe.transfer.checksum import bytes_checksum, combine, dtype_name, host_bytes

    add = progress("verifying the base", tensors.nbytes)
    parts = {}
    for name, shape in tensors.layout.items():
        data = host_bytes(tensors[name])
        parts[name] = (dtype_name(shape.dtype), tuple(shape.shape), bytes_checksum(data))
        add(len(data))
        del data  # frees it before the next one is read
    return combine(parts)


def _merged(base: DeferredTensors, adapter: AdapterContent, dtype: torch.dtype) -> DeferredTensors:
    """Return the tensors of `base` (in `dtype` where they are adapted) with the adapter merged into
    each.

    Raises MergeMismatch if the base lacks an adapted layer.
    """
    from troupe.checkpoints.adapters import MergeMismatch, merged
    from troupe.transfer.deferred import DeferredTensors, TensorGroup

    adapted = {f"{module}.weight": module for module in adapter.modules}
    if absent := sorted(adapted.keys() - base.layout.keys()):
        raise MergeMismatch(f"it has no '{absent[0]}'")

    def group(own: TensorGroup) -> TensorGroup:
        names = [name for name in own.layout if name in adapted]
        if not names:
            return own

        def make() -> dict[str, torch.Tensor]:
            tensors = dict(own.make())
            for name in names:
                # Rounded as for the engines, before the adapter is added.
                weight = {name: tensors.pop(name).to(dtype)}
                tensors[name] = merged(weight, adapter.only(adapted[name]))[name]
            return tensors

        layout = {n: t.to(dtype) if n in names else t for n, t in own.layout.items()}
        return TensorGroup(layout, make)

    return DeferredTensors([group(own) for own in base.groups])
