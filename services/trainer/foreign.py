"""Committed training state from another trainer's disk, where hosts share no `data_dir`.

It moves as it lies there: one directory, its files as they are, through the transfer layer. So it
does not matter who wrote it in which format; `StateStore.load` verifies what arrived as it
verifies its own. It costs nothing until a policy moves: nothing is copied ahead, unless
`trainer_state_replicas` says so (`replicate`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import structlog
import torch

from services.chassis.transfer import HostTransfer
from services.trainer.settings import TrainerSettings
from services.trainer.state import StateStore, TrainingState
from troupe.rpc import NO_RETRY, FailedPrecondition, NotFound, TroupeError, new_id
from troupe.rpc.channel import connect_sync
from troupe.v1 import trainer_pb2 as pb
from troupe.v1 import trainer_pb2_grpc

log = structlog.get_logger("troupe.trainer")

# Putting a state into memory; as for a checkpoint, disks may be slow.
_OFFER_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 0.5


class ForeignStates:
    """What other trainers have on their disks. Blocking; safe to use from several threads."""

    def __init__(self, host: HostTransfer, settings: TrainerSettings) -> None:
        self._host, self._settings = host, settings

    def store(self, job_id: str, policy: str) -> StateStore:
        """The kept versions of a policy: what this host lacks comes from another one that keeps it,
        what is saved here is copied as often as `trainer_state_replicas` says."""
        return _Reaching(self, self._settings, job_id, policy)

    def bring(self, store: StateStore, version: int, checksum: str) -> None:
        """Have the state of `version` in `store`, from whichever trainer keeps it.

        Waits `trainer_state_wait_seconds` for one to come up. Raises FailedPrecondition of kind
        "state_not_found", saying what is lost and how to keep it; at once where this host knows
        no others.
        """
        if store.exists(version, checksum):
            return
        if not self._settings.shares_states:
            return  # who loads it is told what is kept here
        began = time.monotonic()
        troubles: dict[str, str] = {}
        while True:
            for address in self._trainers(store, version, troubles):
                if self._from(address, store, version, checksum, troubles):
                    return
            if time.monotonic() - began > self._settings.trainer_state_wait_seconds:
                raise self._lost(store, version, checksum, troubles)
            time.sleep(_POLL_SECONDS)

    def offer(self, job_id: str, policy: str, version: int, checksum: str) -> pb.OfferStateResponse:
        """Put a state of this host's disk where other hosts can read it. Repeatable.

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
        # Unversioned, so that whoever has read it may delete it.
        key = f"{job_id}/states/{policy}/{path.name}"
        # Who came for an earlier one has it, or has died.
        for old in self._host.keys(f"{job_id}/states/{policy}/"):
            if old != key:
                self._host.delete(old)
        manifest = self._host.set(key, _files(path))
        log.info("state offered", job_id=job_id, policy=policy, version=version)
        return pb.OfferStateResponse(
            key=key,
            checksum=manifest.checksum,
            num_bytes=manifest.num_bytes,
            holders=self._host.holders,
        )

    def keep(
        self, job_id: str, policy: str, version: int, offer: pb.OfferStateResponse
    ) -> pb.KeepStateResponse:
        """Copy what another host's trainer offers to this one's disk. Repeatable.

        Nothing is done for an offer of this host. Raises TransferError, DataLoss,
        ResourceExhausted.
        """
        if set(offer.holders) & set(self._host.holders):
            return pb.KeepStateResponse()
        store = StateStore(self._settings.data_dir, job_id, policy)
        self._take(store, offer)
        store.prune(version, self._settings.trainer_keep_states, first=True)
        return pb.KeepStateResponse(kept=True, has_first=store.exists(0))

    def replicate(self, store: StateStore, version: int, checksum: str) -> int:
        """Have `trainer_state_replicas` other hosts keep a copy; how many do now.

        Called before the version is committed: what is committed can be lost with one host no
        more. Too few hosts is a warning, not a reason to stop training. Who takes a copy for the
        first time gets version 0 too, where this host still needs it.
        """
        wanted = self._settings.trainer_state_replicas
        if not wanted or not self._settings.shares_states:
            return 0
        troubles: dict[str, str] = {}
        takers = self._trainers(store, version, troubles)
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
        """Have `wanted` of `takers` keep a copy: who does, and whether it has version 0 too."""
        offer = self.offer(store.job_id, store.policy, version, checksum)
        kept: dict[str, bool] = {}
        try:
            for address in takers:
                if len(kept) == wanted:
                    break
                request = pb.KeepStateRequest(
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
        self,
        address: str,
        store: StateStore,
        version: int,
        checksum: str,
        troubles: dict[str, str],
    ) -> bool:
        request = pb.OfferStateRequest(
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

    def _take(self, store: StateStore, offer: pb.OfferStateResponse) -> None:
        self._host.hint(offer.key, offer.holders)
        files, _ = self._host.get(offer.key, expected_checksum=offer.checksum)
        name = offer.key.rpartition("/")[2]
        store.take_in(name, {part: bytes_.numpy().data for part, bytes_ in files.items()})
        self._host.delete(offer.key)

    @contextlib.contextmanager
    def _trainer(self, address: str) -> Iterator[Any]:
        channel = connect_sync(address, self._settings.client(retry=NO_RETRY))
        try:
            yield trainer_pb2_grpc.TrainerStub(channel)
        finally:
            channel.close()

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


class _Reaching(StateStore):
    def __init__(
        self, foreign: ForeignStates, settings: TrainerSettings, job_id: str, policy: str
    ) -> None:
        super().__init__(settings.data_dir, job_id, policy, sync=settings.trainer_sync_files)
        self._foreign = foreign

    def load(self, version: int, checksum: str = "", *, whole: bool = True) -> TrainingState:
        self._foreign.bring(self, version, checksum)
        return super().load(version, checksum, whole=whole)

    def save(self, state: TrainingState) -> Path:
        path = super().save(state)
        self._foreign.replicate(self, state.version, state.checksum)
        return path


def _named(store: StateStore, version: int) -> dict[str, Any]:
    """A version of a policy, in requests and log lines."""
    return {"job_id": store.job_id, "policy": store.policy, "version": version}


def _files(path: Path) -> dict[str, torch.Tensor]:
    """The files below `path` as bytes, mapped."""
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
