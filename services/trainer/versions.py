"""The committed version of one policy, and the next one until it is committed.

`RemoteStates` exchanges training states with trainers of other hosts; `Versions` keeps memory, disk
and publication (publication.py) of a policy at one version.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import structlog
import torch
from google.protobuf.json_format import MessageToDict, ParseDict

from services.chassis.transfer import HostTransfer
from services.trainer.learning.interface import PolicyLearner
from services.trainer.learning.model import policy_seed
from services.trainer.learning.optimizer import Generators, Randomness, seeded
from services.trainer.publication import Publication
from services.trainer.settings import TrainerSettings
from services.trainer.state.durability import Durability, Recovery
from services.trainer.state.suspension import SuspendedTensors, below, on_host, under
from services.trainer.state.training_state import (
    Frontier,
    KeptState,
    StateStore,
    StoredWeights,
    TrainingState,
)
from troupe.checkpoints.proof import Proof, Proven, passage_ids
from troupe.contracts import kinds
from troupe.job import JobSpec
from troupe.rpc import NO_RETRY, DataLoss, FailedPrecondition, NotFound, TroupeError, new_id
from troupe.rpc.channel import connect_sync
from troupe.transfer import KeyNotFound, checksum_of
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import trainer_pb2 as trainer_pb
from troupe.v1 import trainer_pb2_grpc as trainer_grpc

log = structlog.get_logger("troupe.trainer")

# Deadline in seconds for another trainer to read a state from its disk, or to fetch and write it:
# 32 billion parameters at 100 MB/s. The channel's keep-alive notices one that is gone.
_OFFER_SECONDS: Final = 4000.0
_POLL_SECONDS: Final = 0.5


class RemoteStates:
    """Client for training states on the disks of other hosts' trainers. Blocking; thread-safe."""

    def __init__(self, host: HostTransfer, settings: TrainerSettings) -> None:
        self._host, self._settings = host, settings
        # Whether it is known, and was said, that no other host has a trainer.
        self._alone = False

    def store(self, job_id: str, policy: str) -> StateStore:
        """Return the state store of a policy that fetches missing states from other hosts, and
        copies saved ones to `trainer_state_replicas` hosts."""
        return ReplicatedStateStore(self, self._settings, job_id, policy)

    def copy_to_device(self, store: StateStore, version: int, checksum: str) -> None:
        """Fetch the state of `version` into `store`, from any trainer that keeps it.

        Waits up to `trainer_state_wait_seconds` for a trainer that has it. Does nothing on a single
        host. Raises FailedPrecondition of kind "state_not_found".
        """
        if store.exists(version, checksum):
            return
        if not self._settings.shares_states:
            return  # `StateStore.load` then raises an error that lists the kept versions
        began = time.monotonic()
        troubles: dict[str, str] = {}
        while True:
            for address in self._trainers(store, version, troubles):
                if self._from(address, store, version, checksum, troubles):
                    return
            if time.monotonic() - began > self._settings.trainer_state_wait_seconds:
                raise self._lost(store, version, checksum, troubles)
            time.sleep(_POLL_SECONDS)

    def offer(
        self, job_id: str, policy: str, version: int, checksum: str
    ) -> trainer_pb.OfferStateResponse:
        """Put a state on this host's disk into the transfer layer for other hosts. Idempotent.

        Raises NotFound of kind "state_not_found", StorageFull.
        """
        store = StateStore(self._settings.data_dir, job_id, policy)
        path = store.find(version, checksum)
        if path is None:
            raise NotFound(
                f"version {version} of policy {policy} is not kept here",
                kind="state_not_found",
                field="version",
                value=version,
            )
        # Without a version in the key, so that the reader may delete it.
        key = f"{job_id}/states/{policy}/{path.name}"
        # Earlier offers were read, or their reader has died.
        for old in self._host.keys(f"{job_id}/states/{policy}/"):
            if old != key:
                self._host.delete(old)
        manifest = self._host.set(key, _files(path))
        log.info("state offered", job_id=job_id, policy=policy, version=version)
        return trainer_pb.OfferStateResponse(
            key=key,
            checksum=manifest.checksum,
            num_bytes=manifest.num_bytes,
            holders=self._host.holders,
        )

    def keep(
        self, job_id: str, policy: str, version: int, offer: trainer_pb.OfferStateResponse
    ) -> trainer_pb.KeepStateResponse:
        """Copy a state that another host's trainer offers to this host's disk. Idempotent.

        Does nothing for this host's own offer. Raises TransferError, DataLoss, ResourceExhausted.
        """
        if set(offer.holders) & set(self._host.holders):
            return trainer_pb.KeepStateResponse()
        store = StateStore(self._settings.data_dir, job_id, policy)
        self._take(store, offer)
        store.prune(version, self._settings.trainer_keep_states, first=True)
        return trainer_pb.KeepStateResponse(kept=True, has_first=store.exists(0))

    def replicate(self, store: StateStore, version: int, checksum: str) -> int:
        """Copy a state to `trainer_state_replicas` other hosts; returns to how many.

        Called before the commit, so that a committed version survives the loss of a host. Too few
        hosts are only a warning. A host without version 0 gets that too, if this host keeps it.
        """
        wanted = self._settings.trainer_state_replicas
        if not wanted or not self._settings.shares_states:
            return 0
        troubles: dict[str, str] = {}
        takers = self._trainers(store, version, troubles)
        if not takers and not troubles:
            if not self._alone:
                log.warning("no trainer of another host keeps a copy of states: there is none")
            self._alone = True
            return 0
        self._alone = False
        kept = self._hand_out(store, version, checksum, takers, wanted, troubles)
        late = [address for address, has_first in kept.items() if not has_first]
        if late and store.exists(0):
            self._hand_out(store, 0, "", late, len(late), {})
        return len(kept)

    def _hand_out(
        self,
        store: StateStore,
        version: int,
        checksum: str,
        takers: Sequence[str],
        wanted: int,
        troubles: dict[str, str],
    ) -> dict[str, bool]:
        """Have `wanted` of `takers` keep a copy.

        Returns, by address of those that do, whether they also have version 0.
        """
        offer = self.offer(store.job_id, store.policy, version, checksum)
        kept: dict[str, bool] = {}
        try:
            for address in takers:
                if len(kept) == wanted:
                    break
                request = trainer_pb.KeepStateRequest(
                    request_id=new_id("keep"), offer=offer, **_named(store, version)
                )
                with self._trainer(address) as trainer:
                    try:
                        answer = trainer.KeepState(request, timeout=_OFFER_SECONDS)
                    except TroupeError as error:
                        troubles[address] = error.message
                        continue
                if answer.kept:
                    kept[address] = answer.has_first
        finally:
            self._host.delete(offer.key)
        if len(kept) < wanted:
            log.warning(
                "too few copies of a state",
                kept=len(kept),
                wanted=wanted,
                troubles=troubles,
                **_named(store, version),
            )
        return kept

    def _trainers(self, store: StateStore, version: int, troubles: dict[str, str]) -> list[str]:
        key = f"{store.job_id}/{store.policy}/state@{version}"
        try:
            found = self._host.directory(key).trainers
        except TroupeError as error:
            troubles["orchestrator"] = error.message
            return []
        return [address for address in found if address != self._settings.address]

    def _from(
        self, address: str, store: StateStore, version: int, checksum: str, troubles: dict[str, str]
    ) -> bool:
        request = trainer_pb.OfferStateRequest(
            request_id=new_id("offer"), checksum=checksum, **_named(store, version)
        )
        with self._trainer(address) as trainer:
            try:
                offer = trainer.OfferState(request, timeout=_OFFER_SECONDS)
                self._take(store, offer)
                self._host.drop([offer.key])
            except TroupeError as error:
                troubles[address] = error.message
                return False
        size = offer.num_bytes
        log.info("state fetched", source=address, num_bytes=size, **_named(store, version))
        return True

    def _take(self, store: StateStore, offer: trainer_pb.OfferStateResponse) -> None:
        self._host.hint(offer.key, offer.holders)
        files, _ = self._host.get(offer.key, expected_checksum=offer.checksum)
        name = offer.key.rpartition("/")[2]
        store.take_in(name, {part: bytes_.numpy().data for part, bytes_ in files.items()})
        self._host.delete(offer.key)

    @contextlib.contextmanager
    def _trainer(self, address: str) -> Iterator[Any]:
        client = self._settings.client(retry=NO_RETRY)
        with contextlib.closing(connect_sync(address, client)) as channel:
            yield trainer_grpc.TrainerStub(channel)

    def _lost(
        self, store: StateStore, version: int, checksum: str, troubles: Mapping[str, str]
    ) -> FailedPrecondition:
        asked = "; ".join(f"{who}: {why}" for who, why in troubles.items()) or "there is none"
        return FailedPrecondition(
            f"training state of policy {store.policy} at version {version} with checksum "
            f"{checksum or '(any)'} is lost: no trainer that answers keeps weights, optimizer and "
            f"random generators of it ({asked})",
            kind="state_not_found",
            field="version",
            value=version,
            remedy="Bring the host back that trained it and resume the job. To be able to lose a "
            "host, give all trainers the same data_dir (TROUPE_DATA_DIR) or keep copies "
            "(TROUPE_TRAINER_STATE_REPLICAS).",
        )


class ReplicatedStateStore(StateStore):
    """A state store that fetches from and copies to other hosts (`RemoteStates`)."""

    def __init__(
        self, foreign: RemoteStates, settings: TrainerSettings, job_id: str, policy: str
    ) -> None:
        super().__init__(settings.data_dir, job_id, policy, sync=settings.trainer_sync_files)
        self._remote, self._settings = foreign, settings

    def sibling(self, job_id: str, policy: str) -> StateStore:
        return ReplicatedStateStore(self._remote, self._settings, job_id, policy)

    def load(self, version: int, checksum: str = "") -> KeptState:
        self._remote.copy_to_device(self, version, checksum)
        return super().load(version, checksum)

    def stored(self, version: int, checksum: str = "") -> StoredWeights:
        self._remote.copy_to_device(self, version, checksum)
        return super().stored(version, checksum)

    def save(self, state: TrainingState) -> Path:
        path = super().save(state)
        self._remote.replicate(self, state.version, state.checksum)
        return path


def _named(store: StateStore, version: int) -> dict[str, Any]:
    """Return the fields that identify a version of a policy in requests and log lines."""
    return {"job_id": store.job_id, "policy": store.policy, "version": version}


def _files(path: Path) -> dict[str, torch.Tensor]:
    """Return the files below `path` as memory-mapped bytes, by relative path."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.rglob("*")):
        if file.is_file():
            size = file.stat().st_size
            name = file.relative_to(path).as_posix()
            found[name] = (
                torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
                if size
                else torch.empty(0, dtype=torch.uint8)
            )
    return found


class Versions:
    """Keeps memory, disk and publication of one policy at its committed version.

    All methods block; they run in the compute thread or, if they say so, in any thread.
    """

    def __init__(
        self,
        spec: JobSpec,
        settings: TrainerSettings,
        device: torch.device,
        states: StateStore,
        publication: Publication,
    ) -> None:
        self._job_id, self._policy, self._spec = states.job_id, states.policy, spec
        self._settings = settings
        self._device = device
        self._states, self._publication = states, publication
        self._learner: PolicyLearner[Any] | None = None
        # Whether the learner has the first version to compare with, if it needs that.
        self._referenced = False
        self.tokenizer: Any = None
        self.weights = common_pb.WeightsRef()
        # The frontier of the committed version, and whether it was verified against the commit.
        self.frontier = Frontier()
        self.verified = False
        # Whether the model in memory may differ from the committed version.
        self.dirty = False
        self.randomness = Randomness({}, device)
        self.durability = Durability(spec, states, settings, device)
        # Whether the weights in memory, computed again after a crash, differ from the published
        # ones by rounding.
        self._rounded = False
        # The weights that the optimizer has made and that are not committed yet: their id
        # (`DeviceWeights.step_result`), and the tensors of the publication.
        self._stepped: tuple[str, Mapping[str, torch.Tensor]] | None = None
        # Held while they are sent: nothing may change them.
        self._sending = threading.Lock()

    @property
    def committed(self) -> int:
        """The number of the committed version."""
        return self.weights.version

    def holds(self, version: int, checksum: str) -> bool:
        """Return whether the weights in memory are exactly those published as `version`. In the
        compute thread."""
        return self.may_hold(version, checksum) and not (self._rounded or self.learner.lost)

    def may_hold(self, version: int, checksum: str) -> bool:
        """Return whether the weights in memory may be those that were published as `version`: no
        other version, and no step that is not committed. In any thread."""
        same = (self.weights.version, self.weights.checksum) == (version, checksum)
        return same and self.made and not self.dirty

    def published(self, version: int, checksum: str) -> Mapping[str, torch.Tensor]:
        """Return the published tensors of a version, in shared memory. In any thread.

        Raises KeyNotFound once it is deleted, Corrupt.
        """
        return self._publication.tensors(version, checksum)

    @property
    def learner(self) -> PolicyLearner[Any]:
        """The policy's learner; only after `of`."""
        assert self._learner is not None, "no model was loaded yet"
        return self._learner

    @property
    def made(self) -> bool:
        """Whether the learner has been made."""
        return self._learner is not None

    def of(self, learner: PolicyLearner[Any], tokenizer: Any) -> None:
        """Set the learner whose versions are kept, and its tokenizer."""
        self._learner, self.tokenizer, self._referenced = learner, tokenizer, False

    def load(self, version: int, checksum: str) -> None:
        """Load `version` and publish its weights.

        `checksum`: as committed, or empty for a new job. Raises FailedPrecondition or DataLoss when
        the state is missing or damaged.
        """
        trained = self._spec.policies[self._policy].trainable
        kept = trained and self._states.exists(version, checksum)
        if version > 0 or kept:
            self._restore(version, checksum)
        else:
            self.randomness = Randomness(self._seeded(), self._device)
            self._begin_with_origin()
        self._publish_again(version, checksum)
        if trained and not kept and version == 0:
            self.durability.save(self._snapshot(self.weights, self.frontier))
            self.durability.loaded(0)
            self._states.forget_origin()
        elif trained and self.durability.durable != version:
            # Computed again: at once, so that further crashes do not cost these steps once more.
            self.write_behind(at_once=True)

    def _begin_with_origin(self) -> None:
        """Load weights and optimizer of another job's version, if the policy begins with them
        (`init_from.optimizer`). Raises as `StateStore.load`."""
        given = self._spec.policies[self._policy].init_from
        if given is None or not given.optimizer:
            return  # the model was loaded from the checkpoint
        assert given.job is not None, "a path has no optimizer state"
        assert given.version is not None, "the orchestrator has found it"
        state = self._states.origin(given.job, given.policy or self._policy, given.version)
        self.learner.load(state)
        log.info("began with a state", job_id=self._job_id, source=given.job, version=given.version)

    def _publish_again(self, version: int, checksum: str) -> None:
        """Publish the loaded weights where this host lacks them. Raises as `Publication.ensure`."""
        self._publication.ensure_base(self.learner.base, lambda: self._prove("base"))
        if self._rounded:
            found = self._publication.existing(version, checksum)
            if found is None:
                raise self._not_reproduced(version, checksum)
            self.weights = found
            return
        tensors = self.learner.published()
        self.weights = self._publication.ensure(version, tensors, checksum, self._prove)

    def _prove(self, what: Proven = "published") -> Proof | None:
        """Compute what servers of the weights in memory must answer; None where none serves them:
        embedded engines compare checksums."""
        if self._spec.policies[self._policy].engine.kind == "embedded":
            return None
        return self.learner.proof(passage_ids(self.tokenizer), what)

    def set_reference(self) -> None:
        """Give the learner the first version as the reference, if its loss needs one, once."""
        trained = self._spec.policies[self._policy].trainable
        if self.learner.needs_reference and trained and not self._referenced:
            self.learner.load_reference(self._states.load(0))
            self._referenced = True

    def ensure_published(self) -> None:
        """Publish the committed version again if it is missing."""
        self._publish_again(self.committed, self.weights.checksum)

    def stepped(self) -> common_pb.WeightsRef:
        """Let the weights that the optimizer has just made be sent (`uncommitted`) until they are
        committed or given up. Return a reference to them without key, checksum and proof."""
        result = new_id("result")
        self._stepped = result, self.learner.published()
        return self._publication.announced(self.committed + 1, result)

    @contextlib.contextmanager
    def uncommitted(self, step_result: str) -> Iterator[Mapping[str, torch.Tensor]]:
        """Enter a context with the published tensors of weights that are not committed yet: they
        stay as they are until its end. In any thread, also while `persist` runs.

        Raises FailedPrecondition of kind "weights_moved_on" if they are committed, or given up.
        """
        with self._sending:
            if self._stepped is None or self._stepped[0] != step_result:
                raise FailedPrecondition(
                    f"policy {self._policy} is no longer between this step and its commit",
                    kind="weights_moved_on",
                    field="step_result",
                    value=step_result,
                    remedy="Load the committed version.",
                )
            # Gathered tensors exist in full. Others are made on each read, one after another, and
            # `persist` reads its own.
            gathers = self.learner.gathers
            yield self._stepped[1] if gathers else self.learner.published()

    def _leave_step(self) -> None:
        """Wait for sends in progress, which have a deadline per server (`SendingRound`), then stop
        offering the stepped weights."""
        with self._sending:
            self._stepped = None

    def persist(self, frontier: Frontier, *, keeping: bool) -> common_pb.WeightsRef:
        """Publish the stepped weights as the next version, and write its state unless the store is
        `keeping` the step's rows.

        Neither counts before the commit. Raises StorageFull, ResourceExhausted.
        """
        if self._stepped is None:
            self.stepped()
        assert self._stepped is not None
        result, tensors = self._stepped
        weights = self._publication.publish(self.committed + 1, tensors, self._prove(), result)
        if not keeping:
            self.durability.save(self._snapshot(weights, frontier))
        return weights

    def keeps_rows(self, step: int) -> bool:
        """Return whether `step`, which begins, may be committed before its state is on disk."""
        return self.durability.keeps_rows(step, self.committed, copies=self.learner.copies)

    def make_durable(self, version: int) -> None:
        """Write the state of `version` if it is the committed one, in memory, and not on disk.

        In the compute thread, also in the middle of a step. Raises ResourceExhausted.
        """
        self.durability.settle()
        trained = self._spec.policies[self._policy].trainable
        if (
            not trained
            or self.dirty
            or version != self.committed
            or self.durability.durable >= version
        ):
            return
        self.durability.save(self._snapshot(self.weights, self.frontier, committed=True))
        self.durability.saved(version)
        self.durability.free_rows(version, self.weights.checksum)

    def flush(self) -> None:
        """Like `make_durable`, before the policy leaves this worker. A failure is only logged: the
        store keeps the rows."""
        if not self.made or self.learner.lost:
            return
        try:
            self.make_durable(self.committed)
        except TroupeError as error:
            log.warning("state not written", policy=self._policy, error=str(error))

    def restart(self, version: int, checksum: str) -> None:
        """Make the first version's state the version after `version`, without a step. Idempotent.

        The frontier and random generators stay `version`'s. `checksum`: of version 0, as committed.
        Raises FailedPrecondition of kind "not_bound" at another version, "state_not_found" when
        version 0 is not kept, "weights_changed" when it is another one; StorageFull,
        ResourceExhausted.
        """
        if self.committed == version + 1 and self.weights.checksum == checksum:
            return
        if self.committed != version:
            raise FailedPrecondition(
                f"policy {self._policy} is bound at version {self.committed}",
                kind=kinds.NOT_BOUND,
                field="version",
                value=version,
                remedy="Bind the policy at its committed version first.",
            )
        frontier, verified, randomness = self.frontier, self.verified, self.randomness
        randomness.rewind()
        self._restore(0, checksum)
        self.dirty = True  # cleared once the next version is durable
        self.frontier, self.verified, self.randomness = frontier, verified, randomness
        tensors = self.learner.published()
        weights = self._publication.ensure(version + 1, tensors, checksum, self._prove)
        self.durability.save(self._snapshot(weights, frontier))
        self.durability.saved(version + 1)
        # The state of `version` stays on disk: the restart may not be recorded.
        self.weights, self.dirty = weights, False

    def adopt(self, commit: store_pb.StepCommit) -> None:
        """Make the version of `commit` the committed one.

        Loads it from disk if memory holds another version. Raises DataLoss of kind "state_mismatch"
        when its state was trained on other samples than the commit says.
        """
        weights = commit.weights
        ours = (self.weights.version, self.weights.checksum)
        if self.dirty or ours != (weights.version, weights.checksum):
            self._restore(weights.version, weights.checksum)
            self.verify(commit)
            self.weights = weights
            self.ensure_published()
        self._prune()

    def verify(self, commit: store_pb.StepCommit | None) -> None:
        """Compare the loaded state with the commit of its step, if both have a digest.

        Raises DataLoss of kind "state_mismatch" when the state was trained on other samples than
        the store has committed.
        """
        mine = self.frontier
        self.verified = True
        if commit is None or commit.outcome != store_pb.STEP_OUTCOME_APPLIED:
            return  # the weights were not made by that step
        if mine.samples_digest is None or not commit.HasField("samples_digest"):
            return
        if (mine.step, mine.samples_digest) != (commit.step, commit.samples_digest):
            self.dirty, self.verified = True, False
            raise DataLoss(
                f"the state of version {commit.weights.version} comes from step {mine.step} and "
                f"samples {mine.samples_digest:016x}; its commit is of step {commit.step} and "
                f"samples {commit.samples_digest:016x}",
                kind="state_mismatch",
                field="version",
                value=commit.weights.version,
                remedy="Restore the directory from a copy and resume the job; or begin a new one "
                "with the newest checkpoint as its policy's `model.path`.",
            )

    def confirm(
        self, weights: common_pb.WeightsRef, frontier: Frontier | None, *, keeping: bool = False
    ) -> None:
        """Note that the step in memory was committed as `weights`. In any thread.

        `frontier`, `keeping`: as given to `persist`; None when the weights did not change.
        """
        self._leave_step()
        self.dirty = False
        if frontier is not None:
            self._rounded = False
            if not keeping:
                self.durability.saved(weights.version)
        if frontier is None:  # like the state on disk, which a restarted worker loads
            self.randomness.rewind()
        else:
            self.randomness.commit()
        self.weights = weights
        self.frontier = frontier or self.frontier
        self.verified = True
        self._prune()

    def reset(self) -> None:
        """Go back to the committed version and discard gradients."""
        self._leave_step()
        if self.dirty or self.learner.lost:
            self._restore(self.committed, self.weights.checksum)
        else:
            self.learner.discard()
            self.randomness.rewind()

    def release(self) -> None:
        """Delete published versions but the newest; `load` publishes again what is missing."""
        self._leave_step()
        self.durability.close()
        self._publication.prune(self.committed, keep=1)

    def pack(self) -> SuspendedTensors:
        """Pack version, frontier and random generators for suspension, without learner state."""
        return SuspendedTensors(
            under("drawn", self.randomness.now) | under("committed", self.randomness.committed),
            {
                "weights": MessageToDict(self.weights, preserving_proto_field_name=True),
                "frontier": [self.frontier.step, self.frontier.samples_digest],
                "verified": self.verified,
                "durable": self.durability.durable,
                "rounded": self._rounded,
            },
        )

    def unpack(self, suspended: SuspendedTensors) -> None:
        """Inverse of `pack`."""
        self.randomness = Randomness(on_host(below("committed", suspended.tensors)), self._device)
        self.randomness.now = on_host(below("drawn", suspended.tensors))
        step, digest = suspended.document["frontier"]
        self.weights, self.frontier = packed_weights(suspended), Frontier(step, digest)
        self.verified, self.dirty = suspended.document["verified"], False
        self._rounded = suspended.document["rounded"]
        self.durability.loaded(suspended.document["durable"])

    def _restore(self, version: int, checksum: str) -> None:
        """Load `version` from disk, or an earlier one from which it is computed again."""
        self._leave_step()
        self.dirty = True  # cleared once everything is restored
        recovery = self.durability.recovery(version, checksum)
        if recovery is None:
            self._load(version, checksum)
        else:
            self.set_reference()
            self._load(recovery.version, recovery.checksum)
            self._recompute(recovery)
        self.dirty = False
        log.info("state loaded", job_id=self._job_id, policy=self._policy, version=version)

    def _load(self, version: int, checksum: str) -> None:
        state = self._states.load(version, checksum)
        self.learner.load(state)
        self.randomness = Randomness(state.generators or self._seeded(), self._device)
        self.frontier, self.verified = state.frontier, False
        self._rounded = False
        self.durability.loaded(version)

    def _recompute(self, recovery: Recovery) -> None:
        """Make the committed steps after the loaded state again, from the rows that were kept.

        Raises DataLoss of kind "kept_rows_gone", or of kind "state_not_reproduced" when the weights
        differ from the committed ones, unless they are published and the job allows rounding.
        """
        began = time.perf_counter()
        for commit in recovery.commits:
            self._step_again(commit)
        weights = recovery.commits[-1].weights
        if checksum_of(self.learner.published()) != weights.checksum:
            self._rounded = True
            published = self._publication.existing(weights.version, weights.checksum)
            if self._spec.pipeline.deterministic or published is None:
                raise self._not_reproduced(weights.version, weights.checksum)
            log.warning(
                "weights computed again differ from the published ones by rounding",
                job_id=self._job_id,
                policy=self._policy,
                version=weights.version,
            )
        self.learner.discard()
        self.durability.recomputed(len(recovery.commits), time.perf_counter() - began)

    def _step_again(self, commit: store_pb.StepCommit) -> None:
        """Make one committed step from its rows, in the order in which they were accumulated, and
        at the learning rates that it had: a resumed job's may be others."""
        learner, version = self.learner, commit.weights.version
        learner.discard()
        for samples, sums in self.durability.rows.read(version):
            rows = learner.read(samples, _absent)
            if rows:
                with self.randomness.drawing():
                    learner.accumulate(rows)
            if sums is not None:
                learner.join_pairs(sums)
        with self.randomness.drawing():
            learner.complete()
        with self.randomness.drawing():
            outcome = learner.apply(version - 1, None, dict(commit.metrics))
        if not outcome.applied or outcome.digest != commit.samples_digest:
            raise self._not_reproduced(version, commit.weights.checksum)
        self.randomness.commit()
        self.frontier = Frontier(commit.step, outcome.digest)

    def _not_reproduced(self, version: int, checksum: str) -> DataLoss:
        return DataLoss(
            f"version {version} of policy {self._policy}, whose state was on no disk yet, was "
            f"computed again from its rows, and is not what was committed ({checksum})",
            kind="state_not_reproduced",
            field="version",
            value=version,
            remedy="Resume the job on a worker with the same kind of device, build of torch and "
            "number of threads. Where steps cannot be repeated bit by bit, `state.every: 1` with "
            "`state.background: false` writes each state before its commit.",
        )

    def _seeded(self) -> Generators:
        return seeded(policy_seed(self._spec.seed, self._policy), self._device)

    def write_behind(self, *, over_high_water: bool = False, at_once: bool = False) -> None:
        """Have the committed state, whose step's rows are kept, written in the background, if it is
        time, or `at_once`."""
        if self.learner.copies:
            self.durability.write_behind(
                self._snapshot(self.weights, self.frontier, committed=True),
                self._prune_states,
                over_high_water=over_high_water,
                at_once=at_once,
            )
        elif at_once:
            self.make_durable(self.committed)

    def _snapshot(
        self, weights: common_pb.WeightsRef, frontier: Frontier, *, committed: bool = False
    ) -> TrainingState:
        """Return the state in memory; `committed`: a step may have begun to draw from the
        generators."""
        return TrainingState(
            weights.version,
            weights.checksum,
            self.learner.snapshot(),
            self.randomness.committed if committed else self.randomness.now,
            frontier,
        )

    def _prune(self) -> None:
        self._prune_states(self.durability.durable)
        self._publication.prune(self.committed, self._settings.trainer_keep_states)

    def _prune_states(self, durable: int) -> None:
        """Delete states older than `durable` but those that are to be kept. In any thread."""
        keep = self._settings.trainer_keep_states
        population = self._spec.population
        again = population is not None and population.restart == "base"
        self._states.prune(durable, keep, first=again or self.learner.needs_reference)


def packed_weights(suspended: SuspendedTensors) -> common_pb.WeightsRef:
    """Return the reference to the committed version's weights in a suspended state."""
    return ParseDict(suspended.document["weights"], common_pb.WeightsRef())


def _absent(key: str) -> Any:
    """Stand in for loading values by key: kept rows hold theirs."""
    raise KeyNotFound(key, "is not among the kept rows")
