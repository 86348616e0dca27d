"""Frozen versions of policies on disk: members of populations, which are kept while matches need
them.

`{data_dir}/{job}/members/{policy}/v{version}/` is a checkpoint, together with the published tensors
where they differ from the checkpoint's (tied or adapted weights): engines verify them by the
committed checksum.
"""

from __future__ import annotations

from pathlib import Path

import torch

from services.chassis.transfer import HostTransfer
from services.trainer.binding import PolicyBinding
from services.trainer.publication import Publication
from services.trainer.state.checkpoint import PUBLISHED
from troupe.checkpoints.reading import StoredTensors, weight_files
from troupe.checkpoints.retention import remove
from troupe.contracts import kinds
from troupe.rpc import DataLoss, FailedPrecondition, NotFound
from troupe.transfer import Corrupt, KeyNotFound, checksum_of
from troupe.v1 import common_pb2 as common_pb

# Files that hold the published tensors where the model's own do not.
_FILES = (PUBLISHED, "adapter_model.safetensors")


class FrozenVersions:
    """Store of frozen versions in this worker's data directory. Blocking, in any thread."""

    def __init__(self, transfer: HostTransfer, data_dir: Path) -> None:
        self._transfer = transfer
        self._data_dir = data_dir

    def path(self, job_id: str, policy: str, version: int) -> Path:
        """Return the directory of a member. The names are checked (`check_name`): no paths."""
        return self._data_dir / job_id / "members" / policy / f"v{version}"

    def keep(self, binding: PolicyBinding, version: int, checksum: str) -> tuple[str, int]:
        """Freeze a version of a bound policy, and return its path and size in bytes. Idempotent.

        Raises FailedPrecondition ("version_not_kept"), ResourceExhausted ("storage_full").
        """
        path = self.path(binding.job_id, binding.policy, version)
        if not path.is_dir():
            key = Publication(self._transfer, binding.job_id, binding.policy).key(version)
            try:
                tensors, _ = self._transfer.get(key, expected_checksum=checksum)
            except (KeyNotFound, Corrupt) as error:
                raise FailedPrecondition(
                    f"version {version} of policy {binding.policy} is no longer published: "
                    f"{error.message}",
                    kind=kinds.VERSION_NOT_KEPT,
                    field="version",
                    value=version,
                    remedy="Bind the policy again, which publishes its newest version.",
                ) from error
            binding.checkpoints.write(path, version, published=tensors)
        return str(path), sum(one.stat().st_size for one in path.rglob("*") if one.is_file())

    def publish(
        self, job_id: str, policy: str, version: int, checksum: str
    ) -> common_pb.WeightsRef:
        """Publish a kept member's weights in the transfer layer. Idempotent.

        Raises NotFound of kind "member_gone", DataLoss of kind "member_corrupt", StorageFull.
        """
        key = _key(job_id, policy, version)
        try:
            manifest = self._transfer.manifest(key)
            if manifest.checksum != checksum:
                raise Corrupt(key, "holds another content")
            self._transfer.get(key, expected_checksum=checksum)
        except (KeyNotFound, Corrupt):
            tensors = self._read(job_id, policy, version, checksum)
            metadata = {"job_id": job_id, "policy": policy}
            manifest = self._transfer.set(key, tensors, metadata=metadata)
        found = Publication(self._transfer, job_id, policy).reference(
            version, checksum, manifest.num_bytes
        )
        found.key = key
        return found

    def drop(self, job_id: str, policy: str, version: int, *, files: bool) -> None:
        """Delete a member from the transfer layer; with `files`, from disk too."""
        path = self.path(job_id, policy, version)
        self._transfer.delete(_key(job_id, policy, version))
        if files:
            remove(path)

    def _read(
        self, job_id: str, policy: str, version: int, checksum: str
    ) -> dict[str, torch.Tensor]:
        path = self.path(job_id, policy, version)
        if not path.is_dir():
            raise NotFound(
                f"the weights of member {policy}@{version} are gone: there is nothing in {path}",
                kind="member_gone",
                field="member",
                value=f"{policy}@{version}",
                remedy="Restore the directory, or give all trainer workers the same data_dir "
                "(TROUPE_DATA_DIR).",
            )
        one = next((path / name for name in _FILES if (path / name).is_file()), None)
        try:
            files = weight_files(path) if one is None else [one]
            tensors = dict(StoredTensors(files))
            if (content := checksum_of(tensors)) != checksum:
                raise ValueError(f"it has checksum {content}, and {checksum} was frozen")
        except (OSError, ValueError) as error:
            raise DataLoss(
                f"member {policy}@{version} in {path} cannot be used: {error}",
                kind="member_corrupt",
                field="member",
                value=f"{policy}@{version}",
                remedy="Restore the directory.",
            ) from error
        return tensors


def _key(job_id: str, policy: str, version: int) -> str:
    # Every member is version 0 under its own key: hosts drop their copy of a version once they
    # fetch a newer version of the same key, but matches need old and new members.
    return f"{job_id}/{policy}/members/{version}@0"
