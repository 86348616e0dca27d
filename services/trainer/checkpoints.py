"""Which versions of a policy there can be checkpoints of."""

from __future__ import annotations

from pathlib import Path

import torch

from services.trainer.checkpoint import checkpoint_path, lineage_of, save_checkpoint
from services.trainer.state import StateStore
from services.trainer.versions import Versions
from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition


class Checkpoints:
    """Makes checkpoints of kept states, or of the weights that a frozen policy has."""

    def __init__(
        self, spec: JobSpec, data_dir: Path, states: StateStore, versions: Versions
    ) -> None:
        self._spec = spec
        self._data_dir = data_dir
        self._states, self._versions = states, versions

    def save(self, version: int) -> tuple[str, int]:
        """Write the checkpoint of a kept version: its path and bytes. Blocking, in any thread.

        Raises FailedPrecondition of kind "version_not_kept", ResourceExhausted of kind
        "storage_full".
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

        Of its siblings the `keep` newest stay, or all. `published`: the version as engines load it,
        kept exactly.
        """
        states, versions = self._states, self._versions
        job_id, name = states.job_id, states.policy
        policy = self._spec.policies[name]
        weights: dict[str, torch.Tensor] = {}
        committed = version == versions.committed
        step, checksum = -1, versions.weights.checksum if committed else ""
        if not path.is_dir():
            if states.exists(version):
                state = states.load(version, checksum)
                weights, step, checksum = state.weights, state.frontier.step, state.checksum
            elif not policy.trainable and committed:
                weights = versions.learner.weights()
            else:
                kept = ", ".join(map(str, states.versions())) or "none"
                raise FailedPrecondition(
                    f"version {version} of policy {name} is not kept",
                    kind="version_not_kept",
                    field="version",
                    value=version,
                    remedy=f"Ask for one of: {kept}.",
                )
        dtype = torch.float32
        if policy.network is None:
            dtype = getattr(torch, policy.language_model.dtype)
        model = versions.learner.model
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
        )
