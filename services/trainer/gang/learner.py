"""The learner of a policy that a gang trains, as the worker uses it: every call is an order to all
ranks, which have the model (rank_learner.py)."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from services.trainer.gang.gang import ALONE, GangHosts, Gangs, Loaded, encode_rows
from services.trainer.gang.loading import adapted_outline
from services.trainer.gang.payloads import StepPayloads
from services.trainer.gang.rank_learner import What
from services.trainer.learning.frozen_base import AdaptedBase
from services.trainer.learning.interface import Applied, PolicyLearner
from services.trainer.learning.model import outline, outline_to_save, positions_of
from services.trainer.learning.optimizer import Moments
from services.trainer.learning.samples import Load, Row, columns_of, parse_rows
from services.trainer.state.parts import PARTS, Box, StoredParts, store_part
from services.trainer.state.suspension import state_keys
from services.trainer.state.training_state import KeptState, Snapshot, WriteParts
from troupe.checkpoints.adapters import Tensors
from troupe.checkpoints.proof import Proof, Proven
from troupe.functions.shipped import opened
from troupe.job import JobSpec
from troupe.mixtures import Routers, RoutingShape
from troupe.rpc import DataLoss, new_id
from troupe.v1 import experience_store_pb2 as store_pb

# Seconds between checks whether all ranks have written their copies of a state.
_WRITTEN_SECONDS = 0.2
# Seconds between checks whether all hosts have a job's models and code.
_PREPARE_SECONDS = 0.2
# Orders after which the weights may be others.
_CHANGING: Final = frozenset({"apply", "receive", "load", "resume", "open"})
# Orders after which ranks have no rows of earlier ones.
_ENDING: Final = _CHANGING | {"discard"}


class _Published(dict[str, torch.Tensor]):
    """Gathered tensors, and the file that they are mapped from."""

    def __init__(self, tensors: Tensors, path: Path) -> None:
        super().__init__(tensors)
        self.path = path


class GangLearner(PolicyLearner[Row]):
    """A learner whose model is held by the ranks of a gang.

    Raises the errors of `Learner`, and Aborted of kind "gang_lost" if a rank has ended. Then it is
    `lost` until `restore`, `load` or `adopt` start another gang.
    """

    def __init__(
        self,
        gangs: Gangs,
        key: str,
        spec: JobSpec,
        policy: str,
        options: Mapping[str, Any],
        hosts: GangHosts = ALONE,
        submitted: str = "",
        loaded: Loaded = lambda done, total: None,
        replicas_on: Callable[[int], int] = lambda hosts: 1,
    ) -> None:
        """`key`: id of the policy among the gang's; `options`: as for `Learner`; `hosts`: hosts of
        the ranks, also in later gangs; `submitted`: the specification that other hosts
        read, since in `spec` this host's copies have replaced models; `loaded`: called with the
        loaded bytes of the model; `replicas_on`: returns how many of so many hosts have all
        weights."""
        self._loaded, self._replicas_on = loaded, replicas_on
        self._gangs, self._key = gangs, key
        self._job, self._policy, self._options = spec, policy, dict(options)
        self._size = spec.policies[policy].trainer.ranks
        self._submitted = submitted or spec.model_dump_json()
        self._reference: Path | None = None
        # The last result of `published`, unless the weights have changed since.
        self._published: weakref.ref[_Published] | None = None
        self._hosts = hosts
        self._payloads = StepPayloads(lambda: gangs.transfer, key)
        gangs.check(policy, self._size, hosts)
        self._open()

    @property
    def lost(self) -> bool:
        """Whether the ranks have ended, so that the state is lost."""
        return self._gang.lost

    @property
    def gathers(self) -> bool:
        """See `PolicyLearner`."""
        return True

    @property
    def copies(self) -> bool:
        """Whether the hosts of all ranks have this host's data directory, to which each writes."""
        return self._shares_disk

    @property
    def needs_reference(self) -> bool:
        """See `PolicyLearner`."""
        return self._job.needs_reference

    @property
    def num_parameters(self) -> int:
        """See `PolicyLearner`."""
        return self._num_parameters

    @property
    def base(self) -> AdaptedBase | None:
        """The frozen weights under an adapter; None where all weights are trained."""
        return None if self._job.policies[self._policy].lora is None else self._adapted[1]

    @property
    def model(self) -> Any:
        """The Hugging Face model without weights, for checkpoints; made at every access."""
        own = self._job.policies[self._policy]
        return outline_to_save(self._policy, own) if own.lora is None else self._adapted[0]

    @functools.cached_property
    def _adapted(self) -> tuple[Any, AdaptedBase]:
        own = self._job.policies[self._policy]
        gather = functools.partial(self._gathered, "base")
        return adapted_outline(self._policy, own, self._base_checksum, gather)

    @functools.cached_property
    def _longest(self) -> int:
        """Longest sequence of the model (`positions_of`)."""
        return positions_of(self._outline)

    @functools.cached_property
    def _routing(self) -> RoutingShape | None:
        """How the routers of a mixture of experts choose; None for dense models."""
        return Routers.shape_of(self._outline)

    @functools.cached_property
    def _outline(self) -> Any:
        """The model without memory."""
        return outline(self._policy, self._job.policies[self._policy])

    def read(self, claimed: Iterable[store_pb.ClaimedSample], load: Load) -> list[Row]:
        """Parse the samples of a claim for `accumulate`. Raises the errors of `parse_rows`."""
        columns = columns_of(self._job.algorithm)
        return parse_rows(
            claimed,
            self.vocabulary,
            load,
            columns,
            longest=self._longest,
            routing=self._routing,
            user_columns=self._job.algorithm.user_columns,
            payload_kinds=self._payload_kinds,
        )

    def accumulate(self, rows: Sequence[Row], stop: threading.Event | None = None) -> None:
        """Add the gradient of these rows' summed loss. Raises `Stopped` between passes."""
        rows, found_at = self._payloads.store(rows)
        described, data = encode_rows(rows)
        self._order("accumulate", data, stop, rows=described, **found_at)

    def complete(self, stop: threading.Event | None = None) -> None:
        """Add the gradients of rows that were held back. Raises `Stopped`."""
        self._order("complete", stop=stop)

    def pair_sums(self) -> store_pb.PairSums:
        """See `PolicyLearner`. Every rank has the sums of all."""
        return store_pb.PairSums.FromString(self._order("pair_sums").body)

    def join_pairs(self, sums: store_pb.PairSums) -> None:
        """See `PolicyLearner`."""
        self._order("join_pairs", sums.SerializeToString())

    def apply(
        self,
        version: int,
        stop: threading.Event | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> Applied:
        """See `PolicyLearner`. No tokens are kept for the panel, since each rank has only a part of
        them."""
        return Applied(**self._order("apply", stop=stop, version=version, rates=rates).header)

    def discard(self) -> None:
        """Discard the current step."""
        self._order("discard")

    # State.

    def published(self) -> Tensors:
        """Return the tensors that engines load, whole, in shared memory."""
        with contextlib.ExitStack() as files:
            path = files.enter_context(self._gang.file())
            self._order("gather", what="published", path=str(path))
            found = _Published(load_file(path), path)
            # Ranks read the file for the proof as long as there are these tensors.
            weakref.finalize(found, files.pop_all().close)
        self._published = weakref.ref(found)
        return found

    def proof(self, passage: Sequence[int], what: Proven = "published") -> Proof | None:
        """See `PolicyLearner`. While the caller keeps the last result of `published`, and the
        weights are the same, rank 0 computes by these tensors. Otherwise, and for adapters, all
        ranks make the same pass, and gather each layer once more."""
        known = None if self._published is None else self._published()
        where: dict[str, Any] = {}
        if what == "published" and self.base is None and known is not None:
            where["path"] = str(known.path)
        answer = self._order("prove", passage=list(passage), what=what, **where)
        found = answer.header["proof"]
        return None if found is None else Proof.of_text(found)

    def weights(self) -> Tensors:
        """Return parameters and persistent buffers in full precision, whole."""
        return self._gathered("weights")

    def moments(self) -> Moments:
        """Return the state of optimizer and baselines, whole."""
        return self._gathered("moments")

    def restore(self, weights: Mapping[str, torch.Tensor], moments: Moments) -> None:
        """Take over whole weights and moments; forgets accumulated gradients."""
        self._revive()
        self._hand_over("receive", {**weights, **moments})

    def snapshot(self) -> Snapshot:
        """See `PolicyLearner`. Every rank writes its part."""
        return Snapshot(write_parts=self._write, copy_parts=self._copy)

    def _write(self, directory: Path) -> dict[str, str]:
        """Let every rank write its part of weights and moments, and return the files' checksums."""
        where = self._gangs.below_data_dir(directory)
        files: dict[str, str] = self._order("save", directory=where).header["files"]
        return files

    def _copy(self) -> WriteParts | None:
        """Let every rank copy its part of weights and moments to host memory. Return a function
        that lets the copies be written while steps continue, or None if a rank lacks the memory."""
        return self._write_copy if self._order("copy").header["copied"] else None

    def _write_copy(self, directory: Path) -> dict[str, str]:
        """Like `_write`, for the copies; in any thread, since other orders may come in between."""
        self._order("write_copy", directory=self._gangs.below_data_dir(directory))
        while True:
            files: dict[str, str] | None = self._order("copy_written").header["files"]
            if files is not None:
                return files
            time.sleep(_WRITTEN_SECONDS)

    def load(self, state: KeptState) -> None:
        """Let every rank read its part of a state that a gang or a single device has written."""
        self._revive()
        try:
            self._order("load", directory=self._gangs.below_data_dir(state.path))
        except ValueError as error:
            raise DataLoss(
                f"training state {state.path} is not of this model: {error}",
                kind="state_corrupt",
                remedy="Restore the directory from a copy and resume the job; or begin a new one "
                "with the newest checkpoint as its policy's `model.path`.",
            ) from error

    def load_reference(self, state: KeptState) -> None:
        """See `PolicyLearner`."""
        self._reference = state.path  # kept, as another gang has to read it again
        self._read_reference(state.path)

    def _read_reference(self, directory: Path) -> None:
        self._order("reference", directory=self._gangs.below_data_dir(directory))

    # Suspension, in the middle of a step too.

    def suspended(self) -> tuple[Tensors, dict[str, Any]]:
        """Let every rank store its part of the state. Return the parts' description (`PARTS`) and
        plain values (JSON) from which `adopt` continues."""
        state = f"{state_keys(self._key)}{new_id('parts')}"
        try:
            answer = self._order("suspend", state=state)
        except BaseException:
            self._gangs.transfer.clear(state)  # of ranks that have ended since
            raise
        stored = StoredParts.decode(answer.body)
        return {PARTS: stored.as_tensor()}, answer.header["values"]

    def adopt(self, tensors: Tensors, values: Mapping[str, Any]) -> None:
        """Continue from the result of `suspended`, here or where a single device trained the
        policy: every rank reads its part."""
        self._revive()
        if (stored := StoredParts.in_state(tensors)) is not None:
            self._order("resume", stored.encode(), values=dict(values))
        else:
            self._hand_over("resume", tensors, values=dict(values))

    def release(self) -> list[torch.Tensor]:
        """Remove the policy from its ranks; `restore`, `load` and `adopt` bring it back."""
        self._left = True
        self._gangs.forget(self._gang, self._key)
        self._payloads.drop()
        return []

    # Ranks.

    def move_to(self, hosts: GangHosts) -> None:
        """Let the next ranks run on these hosts; the policy was removed from the earlier ranks."""
        self._gangs.check(self._policy, self._size, hosts)
        self._hosts = hosts

    def close(self) -> None:
        """Remove the policy from its ranks."""
        self.release()

    def _open(self) -> None:
        self._left = False
        self._gang = self._gangs.of(self._size, self._key, self._hosts)
        code = opened(self._job.code.sha256) if self._job.code else None
        replicas = self._replicas_on(self._gangs.hosts_of(self._hosts))
        try:
            if self._gang.nodes > 1:
                self._prepare_hosts()
            answer = self._order(
                "open",
                spec=self._job.model_dump_json(),
                policy=self._policy,
                options={**self._options, "replicas": replicas},
                loaded=self._loaded,
                code="" if code is None else str(code.folder),
            )
            self.vocabulary: int = answer.header["vocabulary"]
            self._num_parameters: int = answer.header["parameters"]
            self._payload_kinds: list[str] = answer.header["payload_kinds"]
            self._base_checksum: str = answer.header["base"]
            self._shares_disk: bool = answer.header["shares_disk"]
            if self._reference is not None:
                self._read_reference(self._reference)
        except BaseException:
            self.release()  # here, since the caller gets no learner that it could release
            raise

    def _prepare_hosts(self) -> None:
        """Let the other hosts fetch models and code; orders of other policies may come in
        between."""
        while True:
            answer = self._order("prepare", policy=self._policy, spec=self._submitted)
            if answer.header["ready"]:
                return
            time.sleep(_PREPARE_SECONDS)

    def _revive(self) -> None:
        """Open the policy on ranks again, if it was released or its ranks have ended."""
        if self._left or self.lost:
            self._open()

    def _order(
        self, name: str, body: bytes = b"", stop: threading.Event | None = None, **header: Any
    ) -> Any:
        if name in _CHANGING:
            self._published = None
        answer = self._gang.order(name, body, stop, key=self._key, **header)
        if name in _ENDING:
            self._payloads.drop()
        return answer

    def _hand_over(self, name: str, tensors: Mapping[str, torch.Tensor], **header: Any) -> None:
        """Give whole tensors to the ranks, each of which reads its part."""
        transfer, key = self._gangs.transfer, f"{state_keys(self._key)}{new_id('whole')}"
        boxes = {name: Box.whole(tensor.shape) for name, tensor in tensors.items()}
        try:
            part = store_part(transfer, key, tensors, boxes)
            self._order(name, StoredParts.of(tensors, [part]).encode(), **header)
        finally:
            transfer.delete(key)

    def _gathered(self, what: What) -> Tensors:
        with self._gang.file() as path:
            self._order("gather", what=what, path=str(path))
            # Memory-mapped: the memory is freed with the last of these tensors.
            found: Tensors = load_file(path)
            return found
