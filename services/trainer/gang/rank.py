"""A rank of a gang, a process under torchrun: carries out the leader's orders."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.tensor import DTensor

from services.chassis import logs
from services.chassis.settings import ServiceSettings
from services.chassis.telemetry import Telemetry
from services.chassis.transfer import HostTransfer
from services.trainer.compute import choose_device, give_back_memory
from services.trainer.gang.gang import (
    Channel,
    Frame,
    RankSettings,
    decode_rows,
)
from services.trainer.gang.group import GangGroup
from services.trainer.gang.rank_learner import RankLearner
from services.trainer.gang.sharded_state import as_shard, write_shards
from services.trainer.learning.optimizer import local_part
from services.trainer.learning.ranks import Stopped
from services.trainer.specifications import HostSpecification
from services.trainer.state.durability import HostCopy, step_back
from services.trainer.state.parts import StoredParts
from services.trainer.state.suspension import state_keys
from services.trainer.state.training_state import reported
from troupe.checkpoints.adapters import Tensors
from troupe.contracts import kinds
from troupe.functions.shipped import open_shipped
from troupe.job import JobSpec
from troupe.processes.tether import end_with_parent
from troupe.rpc import FailedPrecondition, TroupeError, from_status, to_status
from troupe.user_code import DEBUG_REMEDY, refuse_breakpoints
from troupe.v1 import experience_store_pb2 as store_pb

# Keys of the rendezvous store.
_CAME, _ALL = "came", "all"
_WAIT = Frame({"order": "wait"})
_LEAVE = Frame({"order": "leave"})
_PAUSE_SECONDS = 0.1
# Seconds between broadcasts to idle ranks, which show that the gang is alive.
_IDLE_SECONDS = 10.0
# Seconds between reports of how much of a model is loaded.
_REPORT_SECONDS = 0.5


class Rank:
    """A rank, which carries out orders on the policies of its gang."""

    def __init__(
        self,
        device: torch.device,
        mesh: DeviceMesh,
        control: dist.ProcessGroup,
        channel: Channel | None,
        settings: ServiceSettings,
        timeout_seconds: float,
    ) -> None:
        """`channel`: the connection to the leader on rank 0; None on other ranks. `settings`: of
        this host's worker. `timeout_seconds`: the limit of one operation of all ranks."""
        self._device, self._channel, self._settings = device, channel, settings
        self._data_dir = settings.data_dir
        self._reported = 0.0
        self._group = GangGroup(
            mesh,
            control,
            self._asked_to_stop,
            settings.data_dir,
            timeout_seconds=timeout_seconds,
            report_load=self._report_load,
        )
        self._members: dict[str, RankLearner] = {}
        # This host's, and through its owner process the other hosts'.
        self._transfer = HostTransfer(settings, Telemetry())
        # Copies of their states; a copy stays until it is written, even if its policy leaves
        # before.
        self._copies: dict[str, ShardCopy] = {}
        # By key of the policy; on the first rank of each host but the leader's.
        self._specs: dict[str, HostSpecification] = {}

    def serve(self, idle_seconds: float) -> None:
        """Carry out orders until the order to leave.

        `idle_seconds`: interval of the broadcasts while there is no order.
        """
        while True:
            order = self._group.broadcast(self._next(idle_seconds) if self._channel else None)
            name = order.header["order"]
            if name == "leave":
                self._transfer.close()
                return
            if name == "wait":
                self._transfer.sweep()
                continue
            answer = self._carry_out(order)
            if self._channel is not None:
                self._channel.send(answer)

    def _asked_to_stop(self) -> bool:
        """Return whether the leader has given up the current step."""
        if self._channel is None:
            return False
        frame = self._channel.receive(0)
        return frame is not None and frame.header["order"] == "stop"

    def _report_load(self, done: int, total: int) -> None:
        """Tell the leader from time to time how many bytes of a model all ranks have loaded."""
        now = time.monotonic()
        if self._channel is not None and now - self._reported > _REPORT_SECONDS:
            self._reported = now
            self._channel.send(Frame({"loaded": [done, total]}))

    def _next(self, seconds: float) -> Frame:
        assert self._channel is not None
        try:
            frame = self._channel.receive(seconds)
        except (EOFError, OSError):
            return _LEAVE  # the leader has ended
        if frame is None or frame.header["order"] == "stop":
            return _WAIT  # a stop that came too late
        return frame

    def _carry_out(self, order: Frame) -> Frame:
        """Return the answer of rank 0. Refusals are answers; anything else ends the gang."""
        try:
            found = self._answer(order)
            return found if isinstance(found, Frame) else Frame(found or {})
        except Stopped:
            return Frame({"stopped": True})
        except TroupeError as error:
            # All ranks got the same input, so all raise the same error.
            return Frame({"refused": True}, to_status(error).SerializeToString())
        except ValueError as error:
            return Frame({"unfit": str(error)})

    def _answer(self, order: Frame) -> Frame | dict[str, Any] | None:
        """Carry out an order on its policy, and return the answer, or its header."""
        header = order.header
        name, key = header["order"], header["key"]
        if name == "prepare":
            return {"ready": self._prepare(header)}
        if name in ("open", "close"):
            if (left := self._members.pop(key, None)) is not None:
                left.forget_payloads()
            del left
            self._drop_copy(key)
            gc.collect()  # FSDP's modules and their hooks refer to one another
            give_back_memory()
            return self._open(header) if name == "open" else None
        if name in ("write_copy", "copy_written"):
            return self._write_copy(key, header)
        member = self._members[key]
        # In the shared memory of the leader's host, rank 0's; None on other ranks.
        path = Path(header["path"]) if "path" in header and self._channel is not None else None
        match name:
            case "accumulate":
                if "payloads" in header:
                    member.payloads.find(self._transfer, header["payloads"])
                member.accumulate(decode_rows(header["rows"], order.body))
            case "complete":
                member.complete()
            case "pair_sums":
                return Frame({}, member.pair_sums().SerializeToString())
            case "join_pairs":
                member.join_pairs(store_pb.PairSums.FromString(order.body))
            case "apply":
                return dataclasses.asdict(member.apply(header["version"], None, header["rates"]))
            case "discard":
                member.discard()
            case "save":
                with self._group.waiting_for_disks(member.num_parameters):
                    files = member.save(self._data_dir / header["directory"])
                    everyone = self._group.gather(json.dumps(files).encode())
                return {"files": {k: v for one in everyone for k, v in json.loads(one).items()}}
            case "copy":
                if key not in self._copies:
                    self._copies[key] = ShardCopy(self._group, self._device)
                return {"copied": self._copies[key].take(member.weights() | member.moments())}
            case "load" | "reference":
                if name == "load":
                    self._forget_suspended(key)
                with self._group.waiting_for_disks(member.num_parameters):
                    loads = name == "load"
                    read = member.load_shards if loads else member.load_reference_shards
                    read(self._data_dir / header["directory"])
            case "receive":
                member.receive(self._transfer, StoredParts.decode(order.body))
            case "gather":
                member.gather(header["what"], path)
            case "suspend":
                self._forget_suspended(key, header["state"])
                stored, values = member.suspend(self._transfer, header["state"])
                return Frame({"values": values}, stored.encode())
            case "resume":
                stored = StoredParts.decode(order.body)
                member.resume(self._transfer, stored, header["values"])
            case "prove":
                if "path" in header:
                    proof = member.prove_gathered(header["passage"], path)
                else:
                    proof = member.proof(header["passage"], header["what"])
                return {"proof": None if proof is None else proof.to_text()}
            case _:
                raise AssertionError(f"there is no order '{name}'")
        return None

    def _forget_suspended(self, key: str, newest: str = "") -> None:
        """Delete what this host has of obsolete suspended states of a policy: all but the one that
        is being stored under `newest`."""
        if self._group.local == 0:
            for one in self._transfer.keys(state_keys(key)):
                if not (newest and one.startswith(newest)):
                    self._transfer.delete(one)

    def _write_copy(self, key: str, header: Mapping[str, Any]) -> dict[str, Any]:
        """Begin to write the copy of a policy's state into `directory`, or answer whether it is
        written. Raises FailedPrecondition where other ranks had made the copy."""
        copy = self._copies.get(key)
        if copy is None or copy.busy == ("directory" in header):
            raise FailedPrecondition(
                "the ranks that had a copy of the state have ended",
                kind=kinds.GANG_LOST,
                remedy="None is needed: the next state is written before its commit.",
            )
        if "directory" in header:
            copy.write(self._data_dir / header["directory"])
            return {}
        try:
            return {"files": copy.files()}
        finally:
            if key not in self._members:
                self._drop_copy(key)

    def _drop_copy(self, key: str) -> None:
        """Free the copy of a policy's state, unless it is being written."""
        if key in self._copies and not self._copies[key].busy:
            self._copies.pop(key).close()

    def _prepare(self, header: Mapping[str, Any]) -> bool:
        """Let each host except the leader's fetch models and code of a job; return whether all have
        them.

        Called repeatedly until they have, since ranks do not wait for it. Raises the error of one
        host's `HostSpecification` on all ranks.
        """
        status: dict[str, Any] = {"ready": True}
        if self._group.local == 0 and self._group.host > 0:
            key, spec_json = header["key"], header["spec"]
            mine = self._specs.get(key)
            if mine is None or mine.spec_json != spec_json:
                mine = HostSpecification(self._settings, header["policy"], spec_json)
                self._specs[key] = mine
            found = mine.found()
            if isinstance(found, TroupeError):
                del self._specs[key]  # the next time it is tried again
                status["problem"] = to_status(found).SerializeToString().hex()
            status["ready"] = found is not None
        everyone = [json.loads(one) for one in self._group.gather(json.dumps(status).encode())]
        for one in everyone:
            if "problem" in one:
                raise from_status(bytes.fromhex(one["problem"]))
        return all(one["ready"] for one in everyone)

    def _open(self, header: Mapping[str, Any]) -> dict[str, Any]:
        found: Any = (header["spec"], header["code"])
        if self._group.hosts > 1:
            if (mine := self._specs.pop(header["key"], None)) is not None:
                found = mine.found()
            # As the first rank of this host has them.
            everyone = self._group.gather(json.dumps(found).encode())
            found = json.loads(everyone[self._group.rank - self._group.local])
        spec, folder = JobSpec.model_validate_json(found[0]), found[1]
        if folder and spec.code is not None and spec.code.sha256:
            open_shipped(spec.code.sha256, Path(folder))
        member = RankLearner(spec, header["policy"], self._group, self._device, **header["options"])
        self._members[header["key"]] = member
        return {
            "vocabulary": member.vocabulary,
            "parameters": member.num_parameters,
            "payload_kinds": sorted(member.payload_kinds),
            "base": "" if member.base is None else member.base.checksum,
            "shares_disk": self._group.shares_disk,
        }


def join_ranks(
    terms: RankSettings, channel: Channel | None
) -> tuple[torch.device, DeviceMesh, dist.ProcessGroup]:
    """Join the other ranks: this rank's device, the device mesh, and a gloo group for control.

    Raises torch.distributed.DistError when some ranks do not join in time.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = choose_device(terms.device)
    if device.type == "cuda":
        # The first: torchrun lets each rank see its own device alone.
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    torch.set_num_threads(terms.threads)
    patience = timedelta(seconds=terms.start_seconds)
    where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = PrefixStore(
        "troupe", TCPStore(*where, is_master=False, timeout=patience, multi_tenant=True)
    )
    store.add(_CAME, 1)
    if channel is not None:
        _report_arrivals(store, size, channel, terms.start_seconds)
    store.wait([_ALL], patience)
    limit = timedelta(seconds=terms.timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    mesh = init_device_mesh(device.type, (size,))
    control = dist.new_group(backend="gloo", timeout=limit)
    assert control is not None
    return device, mesh, control


def _report_arrivals(store: Store, size: int, channel: Channel, seconds: float) -> None:
    """Report the number of ranks that have joined to the leader, until all have."""
    until, reported = time.monotonic() + seconds, 0
    while reported < size and time.monotonic() < until:
        came = store.add(_CAME, 0)
        if came > reported:
            reported = came
            channel.send(Frame({"came": came}))
        elif reported < size:
            time.sleep(_PAUSE_SECONDS)
    if reported >= size:
        store.set(_ALL, "1")


def main() -> None:
    """Run one rank until the leader ends it."""
    if parent := os.environ.get("TROUPE_PARENT_PID"):
        end_with_parent(int(parent), signal.SIGKILL)
    refuse_breakpoints(DEBUG_REMEDY)
    terms = RankSettings.read()
    # FSDP warns of outputs that are views: the loss is one, but is never written to.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    name = f"services.trainer.gang.rank{os.environ['RANK']}"
    settings = terms.settings()
    logs.configure(name, settings.log_level, settings.log_format)
    leads = os.environ["RANK"] == "0"
    channel = Channel.to(Path(terms.channel)) if leads else None
    device, mesh, control = join_ranks(terms, channel)
    rank = Rank(device, mesh, control, channel, settings, terms.timeout_seconds)
    if channel is not None:
        channel.send(Frame({"ready": True}))
    rank.serve(min(_IDLE_SECONDS, terms.timeout_seconds / 3))
    dist.destroy_process_group()


# How long ranks that have written wait for the slowest one.
_WRITE_SECONDS: Final = 6 * 3600.0


class ShardCopy:
    """Host memory for a rank's shards of one policy's state, and the thread that writes them while
    later steps run.

    This corresponds to `state/durability.py` on one device. The ranks' threads write one state
    together (`write_shards`) over a separate process group, since their collectives must not mix
    with the orders' collectives. The leader polls whether all are done, and only then gives the
    directory its name. All ranks make it, and call its methods, in the same order.
    """

    def __init__(self, group: GangGroup, device: torch.device) -> None:
        self._group = group
        limit = timedelta(seconds=_WRITE_SECONDS)
        control = dist.new_group(backend="gloo", timeout=limit)
        assert control is not None, "all ranks are in it"
        self._control: dist.ProcessGroup = control
        self._memory = HostCopy(device, sharers=group.size // group.hosts)
        self._copied: Tensors = {}
        self._thread = ThreadPoolExecutor(1, "state", initializer=step_back)
        self._writing: Future[dict[str, str]] | None = None

    @property
    def busy(self) -> bool:
        """Whether a copy is being written, or was written but not yet reported by `files`."""
        return self._writing is not None

    def take(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Copy this rank's shards of `tensors` in place of the last copy, which is written; False,
        and no copy, where a rank has no memory for it."""
        shards = {name: local_part(tensor) for name, tensor in tensors.items()}
        for there in (self._memory.fits, self._memory.reserve):
            mine = json.dumps(there(shards)).encode()
            if not all(json.loads(one) for one in self._group.gather(mine)):
                return False
        self._copied = self._memory.take(shards) or {}
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                self._copied[name] = as_shard(self._copied[name], tensor)
        return True

    def write(self, directory: Path) -> None:
        """Begin to write the copy into `directory`."""
        self._writing = self._thread.submit(self._write, directory)

    def files(self) -> dict[str, str] | None:
        """Return the checksums of all ranks' files once all have written; None before.

        Raises on all ranks the `TroupeError` of one that could not write.
        """
        assert self._writing is not None, "it was begun"
        said: dict[str, Any] = {"done": self._writing.done()}
        if said["done"]:
            try:
                said["files"] = self._writing.result()
            except TroupeError as error:
                said["problem"] = to_status(error).SerializeToString().hex()
        everyone = [json.loads(one) for one in self._group.gather(json.dumps(said).encode())]
        if not all(one["done"] for one in everyone):
            return None
        self._writing = None
        for one in everyone:
            if "problem" in one:
                raise from_status(bytes.fromhex(one["problem"]))
        return {name: checksum for one in everyone for name, checksum in one["files"].items()}

    def close(self) -> None:
        """Free the memory and end the thread; not while it is `busy`."""
        self._copied = {}
        self._memory.give_back()
        self._thread.shutdown()
        dist.destroy_process_group(self._control)

    def _write(self, directory: Path) -> dict[str, str]:
        with reported(directory, "training state"):
            return write_shards(directory, self._copied, self._control)


if __name__ == "__main__":
    main()
