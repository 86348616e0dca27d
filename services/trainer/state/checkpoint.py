"""Checkpoints for `transformers` and PEFT: `{data_dir}/{job}/checkpoints/{policy}/v{version}`.

The base of an adapter that began with random weights is written once next to them, in
`checkpoints/.base/{checksum}`.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from services.trainer.learning.lora import Adapter, adapter_of
from services.trainer.learning.model import with_dtype
from services.trainer.state.training_state import StateStore, reported
from services.trainer.versions import Versions
from troupe.checkpoints.format import CheckpointFormat, is_transformers
from troupe.checkpoints.reading import StoredTensors
from troupe.checkpoints.retention import prune
from troupe.checkpoints.verifying import Lineage, digests
from troupe.checkpoints.writing import write_checkpoint
from troupe.contracts import kinds
from troupe.disks import sync_directory, sync_file
from troupe.job import JobSpec
from troupe.rpc import DataLoss, FailedPrecondition
from troupe.transfer import DeferredTensors
from troupe.transfer.checksum import checksum_of, dtype_name

# The file of published tensors, if they differ from the checkpoint's own.
PUBLISHED: Final = "published.safetensors"


class CheckpointProgress:
    """Bytes of a checkpoint that is being written: all of them, and those that are written."""

    def __init__(self) -> None:
        self.total, self.written = 0, 0

    def begin(self, total: int) -> None:
        """A checkpoint of `total` bytes is begun."""
        self.total, self.written = total, 0

    def add(self, nbytes: int) -> None:
        """Count bytes that have been written."""
        self.written += nbytes


def checkpoint_path(root: Path, job_id: str, policy: str, version: int) -> Path:
    """Return the directory of a checkpoint."""
    return root / job_id / "checkpoints" / policy / f"v{version}"


def save_checkpoint(
    path: Path,
    model: Any,
    weights: Mapping[str, torch.Tensor],
    tokenizer: Any,
    *,
    keep: int | None,
    lineage: Lineage | None = None,
    published: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
    verified: Callable[[str], bool] | None = None,
    progress: CheckpointProgress | None = None,
) -> int:
    """Write a checkpoint of `weights` in the format of `model`; returns its size in bytes.

    The tokenizer, if there is one, is written too. `lineage`: the origin of the weights, written
    next to them. `published`: the published tensors, written bit for bit to `PUBLISHED` unless
    another file has them. `dtype`: the dtype of floating-point tensors; default: their own.
    `verified`: told the checksum of a language model's tensors in the checkpoint, whether they are
    what they should be.

    Of a language model, one tensor (of a mixture, one layer's experts) at a time is in memory.

    An existing checkpoint is left as it is. `keep`: number of newest checkpoints to keep in
    addition to it; None: all. Raises ResourceExhausted ("storage_full") or FailedPrecondition
    ("storage_unwritable"), and then leaves no partial checkpoint and does not touch older ones.
    """
    adapter, progress = adapter_of(model), progress or CheckpointProgress()
    dtype = dtype or next(t.dtype for t in weights.values() if t.is_floating_point())

    def fill(folder: Path) -> None:
        found = ""
        if adapter is not None:
            base = _base_path(path, adapter, lineage, tokenizer)
            tensors = {name: t.to(dtype) for name, t in weights.items()}
            replace(adapter.content(torch.float32), tensors=tensors).save(folder, base)
        else:
            found = _write_model(folder, model, weights, dtype, progress)
        if found and verified is not None and not verified(found):
            raise DataLoss(
                f"the kept weights of {path.parent.name}, {path.name}, are not what was written",
                kind="state_corrupt",
                field="version",
                value=path.name,
                remedy="Restore the training state from a copy; the next version's checkpoint is "
                "written from its own state.",
            )
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if published is not None:
            if not found:
                found = checksum_of(StoredTensors(folder.glob("*.safetensors")))
            if checksum_of(published) != found:
                save_file(dict(published), folder / PUBLISHED)
        if lineage is not None:
            replace(lineage, files=digests(folder)).write(folder)

    _write_whole(path, fill)
    if keep is not None:
        prune(path.parent, keep)
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def lineage_of(
    spec: JobSpec, job_id: str, policy: str, version: int, step: int, checksum: str, model: Any
) -> Lineage:
    """Return the lineage of a version; `step`: the step that made it, -1 for the first weights."""
    source, adapter = spec.policies[policy], adapter_of(model)
    return Lineage(
        job_id=job_id,
        job=spec.name,
        policy=policy,
        version=version,
        step=step,
        checksum=checksum,
        base_model="" if source.model is None else source.model.path or "",
        base_checksum=adapter.base.checksum if adapter is not None else "",
        algorithm=source.paradigm or f"{spec.algorithm.loss}, {spec.algorithm.advantage}",
    )


def _write_whole(path: Path, fill: Callable[[Path], None]) -> None:
    """Create the directory `path` atomically with the files that `fill` writes."""
    if path.is_dir():
        return
    temp = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    with reported(path.parent, "a checkpoint"):
        try:
            temp.mkdir(parents=True)
            fill(temp)
            for file in temp.rglob("*"):
                if file.is_file():
                    sync_file(file)
            temp.rename(path)
            sync_directory(path.parent)
        except Exception:
            if not path.is_dir():  # otherwise another worker has written the same base
                raise
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    # Leftovers of killed processes.
    for left in path.parent.glob(f".{path.name}.*"):
        shutil.rmtree(left, ignore_errors=True)


def _write_model(
    folder: Path,
    model: Any,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    progress: CheckpointProgress,
) -> str:
    """Write a model's weights and configuration; the checksum of the tensors of a language model,
    empty for a network."""
    found = ""
    if is_transformers(model):
        # Everything except the weights, of which the library would make a second copy.
        model.save_pretrained(folder, state_dict={})
        (folder / "model.safetensors").unlink(missing_ok=True)
        tensors = weights
        if not isinstance(tensors, DeferredTensors):
            tensors = CheckpointFormat(model, dtype).of(weights)
        progress.begin(tensors.nbytes)
        found = write_checkpoint(folder, tensors, progress.add)
    else:
        cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in weights.items()}
        model.save_pretrained(folder, state_dict=cast)
    # The configuration has the dtype of the model in training.
    config = folder / "config.json"
    values = {**json.loads(config.read_text()), "dtype": dtype_name(dtype)}
    config.write_text(json.dumps(values, indent=2) + "\n")
    return found


def _base_path(path: Path, adapter: Adapter, lineage: Lineage | None, tokenizer: Any) -> str:
    """Return the path of the base under an adapter; a base without a path is written first."""
    if lineage is not None and (base := lineage.base_model):
        # Absolute, since the adapter will be loaded from another working directory.
        return str(Path(base).absolute()) if Path(base).is_dir() else base
    place = path.parent.parent / ".base" / adapter.base.checksum

    def fill(folder: Path) -> None:
        module = adapter.base.module
        dtype = next(module.parameters()).dtype
        _write_model(folder, module, adapter.base.weights(), dtype, CheckpointProgress())
        tokenizer.save_pretrained(folder)

    _write_whole(place, fill)
    return str(place)


class Checkpoints:
    """Writes checkpoints of kept states, or of a frozen policy's weights."""

    def __init__(
        self, spec: JobSpec, data_dir: Path, states: StateStore, versions: Versions
    ) -> None:
        self._spec = spec
        self._data_dir = data_dir
        self._states, self._versions = states, versions
        # Of the checkpoint that is being written, or of the last one.
        self.progress = CheckpointProgress()

    def save(self, version: int) -> tuple[str, int]:
        """Write the checkpoint of a kept version; returns its path and bytes.

        Blocking, in any thread.

        Raises FailedPrecondition ("version_not_kept"), ResourceExhausted ("storage_full").
        """
        path = checkpoint_path(self._data_dir, self._states.job_id, self._states.policy, version)
        return str(path), self.write(path, version, keep=self._spec.checkpoint.keep)

    def write(
        self,
        path: Path,
        version: int,
        *,
        keep: int | None = None,
        published: dict[str, torch.Tensor] | None = None,
    ) -> int:
        """Write the checkpoint of a kept version to `path`; returns its bytes. Raises as `save`.

        Of its siblings the `keep` newest stay, or all. `published`: the tensors to keep exactly.
        """
        self.progress.begin(0)
        states, versions = self._states, self._versions
        job_id, name = states.job_id, states.policy
        policy = with_dtype(name, self._spec).policies[name]
        weights: Mapping[str, torch.Tensor] = {}
        committed = version == versions.committed
        step, checksum = -1, versions.weights.checksum if committed else ""
        model = versions.learner.model
        verified: Callable[[str], bool] | None = None
        if not path.is_dir():
            if states.exists(version):
                if is_transformers(model) and adapter_of(model) is None:
                    stored = states.stored(version, checksum)
                    weights, step = stored.tensors, stored.frontier.step
                    checksum, verified = stored.checksum, stored.verified
                else:
                    state = states.load(version, checksum)
                    weights, step, checksum = state.weights, state.frontier.step, state.checksum
            elif not policy.trainable and committed:
                weights = versions.learner.weights()
            else:
                kept = ", ".join(map(str, states.versions())) or "none"
                raise FailedPrecondition(
                    f"version {version} of policy {name} is not kept",
                    kind=kinds.VERSION_NOT_KEPT,
                    field="version",
                    value=version,
                    remedy=f"Ask for one of: {kept}.",
                )
        dtype = getattr(torch, policy.weight_dtype)
        lineage = lineage_of(self._spec, job_id, name, version, step, checksum, model)
        return save_checkpoint(
            path,
            model,
            weights,
            versions.tokenizer,
            keep=keep,
            lineage=lineage,
            published=published,
            dtype=dtype,
            verified=verified,
            progress=self.progress,
        )
