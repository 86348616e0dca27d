"""Publication of a policy's versions in the transfer layer, where engines find them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog
import torch

from services.chassis.transfer import HostTransfer
from services.trainer.learning.frozen_base import AdaptedBase
from troupe.checkpoints.adapters import base_key
from troupe.checkpoints.proof import Proof, metadata_of, proof_in
from troupe.rpc import FailedPrecondition
from troupe.transfer import Corrupt, KeyNotFound, checksum_of
from troupe.v1 import common_pb2 as common_pb

log = structlog.get_logger("troupe.trainer")

Prove = Callable[[], Proof | None]


class Publication:
    """Publishes the versions of one policy in the transfer layer, and deletes old ones."""

    def __init__(
        self,
        transfer: HostTransfer,
        job_id: str,
        policy: str,
        trained_on: common_pb.DeviceWeights | None = None,
    ) -> None:
        """`trained_on`: where engines can have the newest version from its devices."""
        self._transfer = transfer
        self._job, self._policy = job_id, policy
        self._trained_on = trained_on

    def key(self, version: int) -> str:
        """The transfer key of `version`."""
        return f"{self._job}/{self._policy}/weights@{version}"

    def publish(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        proof: Proof | None,
        step_result: str = "",
    ) -> common_pb.WeightsRef:
        """Publish a copy of `tensors` as `version`, with their proof. Raises StorageFull.

        `step_result`: of the optimizer step that made them just now.
        """
        metadata = {"job_id": self._job, "policy": self._policy, **metadata_of(proof)}
        manifest = self._transfer.set(self.key(version), tensors, metadata=metadata)
        ref = self.reference(version, manifest.checksum, manifest.num_bytes, manifest.metadata)
        if step_result:
            ref.trained_on.step_result = step_result
        return ref

    def announced(self, version: int, step_result: str) -> common_pb.WeightsRef:
        """Return the reference to weights of a step that are not published yet."""
        ref = common_pb.WeightsRef(
            job_id=self._job, policy=self._policy, version=version, trained_on=self._trained_on
        )
        ref.trained_on.step_result = step_result
        return ref

    def ensure_base(self, base: AdaptedBase | None, prove: Prove) -> None:
        """Publish the frozen weights under an adapter, once for all policies of the job. `prove`
        computes their proof if they have to be published."""
        if base is None:
            return
        key = base_key(self._job, base.checksum)
        try:
            self._transfer.get(key, expected_checksum=base.checksum)
        except (KeyNotFound, Corrupt) as error:
            log.info("publishing again", key=key, reason=error.message)
            metadata = {"job_id": self._job, **metadata_of(prove())}
            self._transfer.set(key, base.weights(), metadata=metadata)

    def ensure(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        expected: str,
        prove: Prove,
    ) -> common_pb.WeightsRef:
        """Publish `tensors` unless this host has a valid copy of the version. Idempotent. `prove`
        computes their proof if they have to be published.

        Raises FailedPrecondition of kind "weights_changed" when `expected` (the committed
        checksum, or empty) differs from the checksum of `tensors`.
        """
        checksum = checksum_of(tensors)
        if expected and checksum != expected:
            raise FailedPrecondition(
                f"version {version} of policy {self._policy} has checksum {checksum} here, but "
                f"{expected} is committed",
                kind="weights_changed",
                field=f"policies.{self._policy}.model",
                value=version,
                remedy="Restore the model that the job was started with, or start a new job.",
            )
        key = self.key(version)
        try:
            # Only a local copy counts: copies on other hosts are lost with those hosts.
            if self._transfer.manifest(key).checksum != checksum:
                raise Corrupt(key, "holds another attempt at this version")
            manifest = self._transfer.get(key, expected_checksum=checksum)[1]
        except (KeyNotFound, Corrupt) as error:
            log.info("publishing again", key=key, reason=error.message)
            return self.publish(version, tensors, prove())
        return self.reference(version, checksum, manifest.num_bytes, manifest.metadata)

    def tensors(self, version: int, checksum: str) -> Mapping[str, torch.Tensor]:
        """The published tensors of a version, in shared memory. Raises KeyNotFound, Corrupt."""
        return self._transfer.get(self.key(version), expected_checksum=checksum)[0]

    def existing(self, version: int, checksum: str) -> common_pb.WeightsRef | None:
        """The published version with this checksum, copied to this host; None if no host has it."""
        try:
            manifest = self._transfer.get(self.key(version), expected_checksum=checksum)[1]
        except (KeyNotFound, Corrupt):
            return None
        return self.reference(version, checksum, manifest.num_bytes, manifest.metadata)

    def prune(self, newest: int, keep: int) -> None:
        """Delete all versions but the `keep` newest up to `newest`."""
        prefix = f"{self._job}/{self._policy}/weights@"
        for key in self._transfer.keys(prefix):
            version = key.removeprefix(prefix)
            if version.isdigit() and int(version) <= newest - keep:
                self._transfer.delete(key)

    def reference(
        self, version: int, checksum: str, num_bytes: int, metadata: Mapping[str, str] | None = None
    ) -> common_pb.WeightsRef:
        """The reference to a version that is published here, with the proof in its `metadata`."""
        return common_pb.WeightsRef(
            job_id=self._job,
            policy=self._policy,
            version=version,
            key=self.key(version),
            checksum=checksum,
            num_bytes=num_bytes,
            holders=self._transfer.holders,
            trained_on=self._trained_on,
            proof=proof_in(metadata or {}),
        )
