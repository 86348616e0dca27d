"""The leader of a gang: starts its ranks under torchrun and sends them orders.

`Frame` and `Channel` are the messages between the leader and rank 0, which broadcasts them to the
other ranks; `Gang` is one set of ranks, `Gangs` all sets of a worker. `MemberRanks` are ranks on
another worker's devices (lending.py). The module is also the entry point that wraps torchrun, so
that ranks end with the worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import structlog
import torch
from pydantic import SecretStr
from safetensors.torch import load, save

from services.chassis.settings import ServiceSettings
from services.chassis.telemetry import Telemetry
from services.chassis.transfer import HostTransfer
from services.trainer.compute import choose_device
from services.trainer.learning.ranks import Stopped
from services.trainer.learning.samples import Row
from services.trainer.settings import TrainerSettings, process_variables
from services.trainer.state.suspension import pack_rows, unpack_rows
from troupe.contracts import kinds
from troupe.devices import find_devices
from troupe.disks import Scratch
from troupe.processes.ending import stop_process
from troupe.processes.tether import end_with_parent
from troupe.rpc import (
    NO_RETRY,
    Aborted,
    ClientSettings,
    DeadlineExceeded,
    FailedPrecondition,
    TroupeError,
    from_status,
    new_id,
)
from troupe.rpc.addresses import join_address, listen, split_address
from troupe.rpc.channel import connect_sync
from troupe.v1 import trainer_pb2 as trainer_pb
from troupe.v1 import trainer_pb2_grpc as trainer_grpc

log = structlog.get_logger("troupe.gang")

_VARIABLE = "TROUPE_GANG_TERMS"
# Names the leader's host to torchrun, for a gang of several hosts.
_LEADER = "TROUPE_GANG_LEADER"
_LENGTH_BYTES = 8
_POLL_SECONDS = 0.2
# Seconds between SIGTERM and SIGKILL.
GRACE_SECONDS = 5.0
# How long another worker may take to end earlier ranks and start those of a gang.
_LEND_SECONDS = 30.0
# Deadline of the call that holds them; an older gang is lost, and formed again.
_LENT_SECONDS = 30 * 86400.0
# Called with the bytes of a model that ranks have loaded, and the total.
Loaded: TypeAlias = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class RankSettings:
    """The settings of a worker that its ranks need, passed through the environment as JSON."""

    # Path of the leader's Unix socket; empty for ranks on other hosts.
    channel: str
    device: str
    # torch threads of each rank.
    threads: int
    start_seconds: float
    timeout_seconds: float
    # The worker's `ServiceSettings`, without its token. Paths in orders are below its `data_dir`.
    service: dict[str, Any]
    token: str = dataclasses.field(default="", repr=False)

    @classmethod
    def of(cls, settings: TrainerSettings, ranks_here: int, channel: str) -> RankSettings:
        """Return the settings for `ranks_here` ranks on this host."""
        return cls(
            channel=channel,
            device=settings.trainer_device,
            threads=max(1, settings.threads // ranks_here),
            start_seconds=settings.gang_start_seconds,
            timeout_seconds=settings.gang_timeout_seconds,
            service={
                **settings.model_dump(
                    mode="json", include=set(ServiceSettings.model_fields), exclude={"token"}
                ),
                "data_dir": str(settings.data_dir.resolve()),
            },
            token=settings.token.get_secret_value() if settings.token else "",
        )

    def settings(self) -> ServiceSettings:
        """Return the worker's settings."""
        return ServiceSettings(**self.service, token=SecretStr(self.token) if self.token else None)

    def timed(self, start_seconds: float, timeout_seconds: float) -> RankSettings:
        """Return a copy with the deadlines of a gang that another worker leads."""
        return dataclasses.replace(
            self, start_seconds=start_seconds, timeout_seconds=timeout_seconds
        )

    def environment(self) -> dict[str, str]:
        """Environment variables to start ranks with."""
        threads = {
            f"{name}_NUM_THREADS": str(self.threads)
            for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")
        }
        return {**threads, _VARIABLE: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> RankSettings:
        """Restore the settings from the variables of `environment`."""
        return cls(**json.loads(environment[_VARIABLE]))


@dataclasses.dataclass(frozen=True)
class Frame:
    """A message: an order of the leader, or an answer or progress report of rank 0."""

    # Kind and small fields (JSON).
    header: dict[str, Any]
    body: bytes = b""

    def encode(self) -> bytes:
        """Return the length of the header (8 bytes, little-endian), header, body."""
        header = json.dumps(self.header).encode()
        return len(header).to_bytes(_LENGTH_BYTES, "little") + header + self.body

    @classmethod
    def decode(cls, data: bytes) -> Frame:
        """Restore a frame from the bytes of `encode`. Raises ValueError if they are not a frame."""
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        header = json.loads(data[_LENGTH_BYTES:end])
        if not isinstance(header, dict):
            raise ValueError("the header of a frame is not an object")
        return cls(header, data[end:])


class Channel:
    """Connection of the leader and rank 0 over a socket. Raises EOFError, OSError once cut."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = Connection(connection.detach())
        self._sending = threading.Lock()

    @classmethod
    def to(cls, path: Path) -> Channel:
        """Connect to the leader that listens at `path`."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return cls(connection)

    def send(self, frame: Frame) -> None:
        """Send a frame; from any thread."""
        with self._sending:
            self._connection.send_bytes(frame.encode())

    def receive(self, seconds: float) -> Frame | None:
        """Return the next frame, or None if none comes within `seconds`."""
        if not self._connection.poll(seconds):
            return None
        return Frame.decode(self._connection.recv_bytes())

    def close(self) -> None:
        """Close the connection; the other end gets EOFError."""
        self._connection.close()


def encode_rows(rows: Sequence[Row]) -> tuple[list[dict[str, Any]], bytes]:
    """Return rows as plain values (JSON), and their arrays as safetensors."""
    arrays, described = pack_rows(rows)
    return described, save(arrays)


def decode_rows(described: Sequence[dict[str, Any]], data: bytes) -> list[Row]:
    """Restore the rows of `encode_rows`, bit for bit."""
    return unpack_rows(load(data), described)


@dataclasses.dataclass(frozen=True)
class GangHosts:
    """The workers of a gang in addition to the leader, as the orchestrator chose them."""

    # "host:port" of each, in the order of ranks.
    members: tuple[str, ...] = ()
    # Time of the choice, in nanoseconds since 1970.
    formed: int = 0

    @classmethod
    def of(cls, message: trainer_pb.GangHosts) -> GangHosts:
        """Return the hosts in a request."""
        return cls(tuple(message.members), message.formed)


ALONE = GangHosts()


class MemberRanks:
    """Ranks of a gang on the devices of another worker, from this object until `close`."""

    def __init__(
        self, address: str, request: trainer_pb.HostRanksRequest, client: ClientSettings
    ) -> None:
        """Ask the worker at `address` to start the ranks."""
        self.address = address
        # Why they have ended.
        self.problem = ""
        self._started, self._ended = threading.Event(), threading.Event()
        self._channel = connect_sync(address, client)
        stub = trainer_grpc.TrainerStub(self._channel)
        self._call: Any = stub.HostRanks(request, timeout=_LENT_SECONDS)
        threading.Thread(target=self._follow, name=f"ranks-{address}", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether they have ended, or the worker was lost."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until the ranks have started; return whether they have."""
        return self._started.wait(seconds) and not self.ended

    def close(self) -> None:
        """Let the worker end the ranks."""
        self._call.cancel()
        self._channel.close()

    def _follow(self) -> None:
        try:
            for _ in self._call:
                self._started.set()
            self.problem = "its worker ended them"
        except TroupeError as error:
            self.problem = str(error)
        finally:
            self._ended.set()
            self._started.set()


class Gang:
    """Ranks under torchrun, from `Gang(...)` to `close`.

    The ranks are children of this process, through torchrun, and end when it does; ranks on other
    workers end with its calls there. Several threads may give orders, which are serialized: one
    policy can be suspended while another computes.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        size: int,
        given_up: threading.Event,
        hosts: GangHosts = ALONE,
        key: str = "",
    ) -> None:
        """Start `size` ranks, evenly on this host and the other `hosts`, and wait until all have
        joined. `key`: the "JOB/POLICY" for which they start.

        Waits at most `TROUPE_GANG_START_SECONDS`, and stops waiting once `given_up` is set. Raises
        DeadlineExceeded of kind "gang_incomplete", or Aborted of kind "gang_lost".
        """
        self.size = size
        self._settings, self._given_up = settings, given_up
        self.nodes = len(hosts.members) + 1 if hosts.members else settings.gang_nodes
        """Hosts that ranks run on."""
        self._ranks_here = size // self.nodes
        self._members: list[MemberRanks] = []
        self._scratch = Scratch("troupe-gang-")
        self.directory = self._scratch.path
        self._channel: Channel | None = None
        self._turn = threading.RLock()
        self._files = itertools.count(1)
        self._agent: subprocess.Popen[bytes] | None = None
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                path = self.directory / "leader"
                listener.bind(str(path))
                listener.listen(1)
                terms = RankSettings.of(settings, self._ranks_here, str(path))
                host, port = self._endpoint(hosts)
                self._borrow(hosts, key, join_address(host, port))
                self._agent = launch(
                    terms,
                    ranks=self._ranks_here,
                    nodes=self.nodes,
                    node=0,
                    address=host,
                    port=port,
                )
                self._gather(listener)
        except BaseException:
            self.close(orderly=False)
            raise

    @property
    def lost(self) -> bool:
        """Whether the ranks have ended."""
        return self._channel is None

    def order(
        self,
        name: str,
        body: bytes = b"",
        stop: threading.Event | None = None,
        loaded: Loaded = lambda done, total: None,
        **header: Any,
    ) -> Frame:
        """Let all ranks carry out an order, and return the answer of rank 0. `loaded` is called
        with the loaded and total bytes of a model.

        Raises the error in the ranks' answer, `Stopped` when `stop` is set, ValueError for a state
        of another model, and Aborted of kind "gang_lost" if a rank has ended; then all ranks are
        ended.
        """
        with self._turn:
            if self._channel is None:
                raise self._loss(f"'{name}' was not begun")
            if stop is not None and stop.is_set():
                raise Stopped
            try:
                self._channel.send(Frame({"order": name, **header}, body))
                answer = self._answer(name, stop, loaded)
            except (EOFError, OSError) as error:
                if not self._given_up.is_set():
                    # torchrun ends the other ranks and logs which was first.
                    self._ended()
                self.close(orderly=False)
                raise self._loss(f"a rank ended during '{name}'") from error
        if answer.header.get("stopped"):
            raise Stopped
        if answer.header.get("refused"):
            raise from_status(answer.body)
        if "unfit" in answer.header:
            raise ValueError(answer.header["unfit"])
        return answer

    @contextlib.contextmanager
    def file(self) -> Iterator[Path]:
        """Yield a path for a file in the shared memory of this host, which is removed
        afterwards."""
        path = self.directory / f"{next(self._files)}.safetensors"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def close(self, *, orderly: bool = True) -> None:
        """End all ranks after the current order: by an order, or by a signal. Idempotent."""
        with self._turn:
            channel, self._channel = self._channel, None
            if channel is not None:
                if orderly:
                    try:
                        channel.send(Frame({"order": "leave"}))
                    except OSError:
                        orderly = False
                else:
                    channel.close()
            if not (orderly and channel is not None and self._ended()):
                # torchrun; its ranks end with it.
                status = 0 if self._agent is None else stop_process(self._agent, GRACE_SECONDS)
                if status == -signal.SIGKILL:
                    log.error("ranks did not end and were killed")
            for member in self._members:
                member.close()
            if channel is not None:
                channel.close()
            self._scratch.close()

    def end(self) -> None:
        """Terminate all ranks now, from any thread; the current order fails. Call `close` later."""
        if self._agent is not None:
            self._agent.send_signal(signal.SIGTERM)

    def _endpoint(self, hosts: GangHosts) -> tuple[str, int]:
        """Host and port at which the ranks meet."""
        if hosts.members:
            # The address at which the others reach this host; ranks listen on all addresses.
            return split_address(self._settings.address)[0], free_port("")
        endpoint = self._settings.gang_endpoint
        host, port = split_address(endpoint)
        try:
            return host, int(port) or free_port(host)
        except (OSError, ValueError) as error:
            raise FailedPrecondition(
                f"ranks of a gang cannot meet at {endpoint}: {error}",
                kind="gang_endpoint_unusable",
                field="gang_endpoint",
                value=endpoint,
                remedy='Set TROUPE_GANG_ENDPOINT to "host:port" with an address of this host.',
            ) from error

    def _borrow(self, hosts: GangHosts, key: str, endpoint: str) -> None:
        """Let the other workers start their ranks, which then wait for the ranks here."""
        settings = self._settings
        job_id, _, policy = key.partition("/")
        for node, address in enumerate(hosts.members, 1):
            request = trainer_pb.HostRanksRequest(
                request_id=new_id("ranks"),
                job_id=job_id,
                policy=policy,
                leader=settings.worker_id,
                formed=hosts.formed,
                endpoint=endpoint,
                ranks=self._ranks_here,
                nodes=self.nodes,
                node=node,
                start_seconds=settings.gang_start_seconds,
                timeout_seconds=settings.gang_timeout_seconds,
            )
            client = settings.client(retry=NO_RETRY)
            self._members.append(MemberRanks(address, request, client))
        until = time.monotonic() + _LEND_SECONDS
        for member in self._members:
            if not member.wait(max(0.0, until - time.monotonic())):
                member.problem = member.problem or f"it did not answer in {_LEND_SECONDS:g} s"
                raise self._loss(f"{member.address} did not start its ranks")

    def _gather(self, listener: socket.socket) -> None:
        """Wait until rank 0 reports that all ranks have joined."""
        seconds, began = self._settings.gang_start_seconds, time.monotonic()
        came = 0
        listener.settimeout(_POLL_SECONDS)
        while time.monotonic() - began < seconds:
            if self._over():
                raise self._loss(f"{came} of {self.size} ranks had come")
            if self._channel is None:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                self._channel = Channel(connection)
            try:
                frame = self._channel.receive(_POLL_SECONDS)
            except (EOFError, OSError) as error:
                raise self._loss(f"{came} of {self.size} ranks had come") from error
            if frame is None:
                continue
            if frame.header.get("ready"):
                took = round(time.monotonic() - began, 1)
                log.info("gang is complete", ranks=self.size, seconds=took)
                return
            came = frame.header["came"]
            log.info("gang gathers", came=came, ranks=self.size)
        nodes = self.nodes
        hosts = f"; they start once all {nodes} hosts are there" if nodes > 1 and not came else ""
        raise DeadlineExceeded(
            f"{came} of {self.size} ranks of a gang came within {seconds:g} s{hosts}",
            kind=kinds.GANG_INCOMPLETE,
            field="gang_start_seconds",
            value=seconds,
            remedy="Check the logs of the missing ranks. Ranks reach each other at "
            "ports of their choice, so all ports must be open between the hosts of a gang. Hosts "
            "that "
            "were given TROUPE_GANG_NODES run `python -m services.trainer.gang`, each of them.",
        )

    def _answer(
        self,
        name: str,
        stop: threading.Event | None,
        loaded: Loaded,
    ) -> Frame:
        assert self._channel is not None
        stopped_at = 0.0
        while True:
            frame = self._channel.receive(_POLL_SECONDS)
            if frame is not None and "loaded" in frame.header:
                loaded(*frame.header["loaded"])
                continue
            if frame is not None:
                return frame
            if self._over():
                raise EOFError
            if stop is None or not stop.is_set():
                continue
            if not stopped_at:
                stopped_at = time.monotonic()
                self._channel.send(Frame({"order": "stop"}))
            elif time.monotonic() - stopped_at > self._settings.gang_timeout_seconds:
                log.error("a gang does not stop", order=name)
                raise EOFError

    def _over(self) -> bool:
        """Return whether torchrun has ended here or on another worker, or the gang was given up."""
        there = self._agent is not None and self._agent.poll() is None
        lost = any(member.ended for member in self._members)
        return not there or lost or self._given_up.is_set()

    def _ended(self) -> bool:
        """Wait up to `GRACE_SECONDS` for the end of torchrun; returns whether it has ended."""
        if self._agent is None:
            return True
        try:
            self._agent.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _loss(self, what: str) -> Aborted:
        others = [f"; {one.address}: {one.problem}" for one in self._members if one.problem]
        return Aborted(
            f"a gang of {self.size} ranks was lost: {what}{''.join(others)}",
            kind=kinds.GANG_LOST,
            remedy="The step begins again from the last committed state, nothing was counted; the "
            "worker's log says which rank ended and why.",
        )


def launch(
    terms: RankSettings, *, ranks: int, nodes: int, node: int, address: str, port: int
) -> subprocess.Popen[bytes]:
    """Start torchrun for the ranks of this host, number `node` of `nodes`."""
    arguments = {
        "nnodes": nodes,
        "node-rank": node,
        "nproc-per-node": ranks,
        # Static rendezvous: the dynamic one exchanges pickled state.
        "rdzv-backend": "static",
        "master-addr": address,
        "master-port": port,
        "max-restarts": 0,
        "monitor-interval": 0.1,
        "shutdown-timeout": int(GRACE_SECONDS) - 2,
    }
    options = [f"--{name}={value}" for name, value in arguments.items()]
    environment = {
        **os.environ,
        **process_variables(os.environ),
        **terms.environment(),
        "TROUPE_PARENT_PID": str(os.getpid()),
        # Every host has the same number of ranks, so they need not be exchanged.
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
    }
    if nodes > 1:
        environment[_LEADER] = address
    if len(find_devices()) >= ranks:
        # Each rank sees only one of this process's devices.
        options.append("--virtual-local-rank")
    agent = [sys.executable, "-m", "services.trainer.gang.gang", *options]
    return subprocess.Popen([*agent, "-m", "services.trainer.gang.rank"], env=environment)


def free_port(host: str) -> int:
    """Return a free TCP port of `host`."""
    with listen(host, 0) as server:
        return int(server.getsockname()[1])


def interface_towards(host: str) -> str | None:
    """Return the network interface through which this host reaches `host`; None if it is
    unknown."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket sends nothing here
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses):
            return name
    return None


def ranks_here(settings: TrainerSettings) -> int:
    """Return the number of ranks that this worker has devices for."""
    if settings.gang_ranks:
        return settings.gang_ranks
    if devices := find_devices():
        return len(devices)
    if choose_device(settings.trainer_device).type == "cuda":
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0))


# The key of a worker's gangs: number of ranks, and the other members.
GangKind: TypeAlias = tuple[int, tuple[str, ...]]


class Gangs:
    """The gangs of a worker, by size and hosts. Thread-safe.

    A gang is started on demand, and ended when another gang needs its devices. A gang with other
    workers' devices ends with its last policy.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._gangs: dict[GangKind, Gang] = {}
        # Keys of the policies that each gang holds.
        self._keys: dict[GangKind, set[str]] = {}
        self._given_up = threading.Event()
        # Lock of both tables; not held while ranks carry out orders.
        self._lock = threading.Lock()

    @functools.cached_property
    def transfer(self) -> HostTransfer:
        """The transfer layer of this host, in which ranks find states that are given to them."""
        return HostTransfer(self._settings, Telemetry())

    def below_data_dir(self, directory: Path) -> str:
        """Return the path of a directory in orders: below each rank's own data directory."""
        root, path = self._settings.data_dir.resolve(), directory.resolve()
        return str(path.relative_to(root) if path.is_relative_to(root) else path)

    def check(self, policy: str, size: int, hosts: GangHosts = ALONE) -> None:
        """Check that this worker can lead a gang of `size` ranks over `hosts`.

        Raises FailedPrecondition of kind "gang_too_large" or "gang_uneven".
        """
        field, nodes = f"policies.{policy}.trainer.gang", self._settings.gang_nodes
        if hosts.members:
            nodes = len(hosts.members) + 1
        most = ranks_here(self._settings) * nodes
        if size > most:
            raise FailedPrecondition(
                f"this worker leads gangs of at most {most} ranks: {most // nodes} on each of "
                f"{nodes} host(s)",
                kind=kinds.GANG_TOO_LARGE,
                field=field,
                value=size,
                remedy="Ask for a smaller gang, or give the worker more devices "
                "(TROUPE_GANG_RANKS, TROUPE_GANG_NODES).",
            )
        if size % nodes or (size != most and nodes > 1 and not hosts.members):
            raise FailedPrecondition(
                f"a gang over {nodes} hosts must use all of their {most} ranks",
                kind=kinds.GANG_UNEVEN,
                field=field,
                value=size,
                remedy=f"Ask for {most}, or for 1.",
            )

    def hosts_of(self, hosts: GangHosts) -> int:
        """Return the number of machines that ranks would run on; 1 if it is unknown how they are
        spread over these."""
        if not hosts.members:
            return self._settings.gang_nodes
        # The orchestrator has sorted workers of one machine together.
        where = [split_address(one)[0] for one in (self._settings.address, *hosts.members)]
        blocks = [len(list(block)) for _, block in itertools.groupby(where)]
        even = len(blocks) == len(set(where)) and len(set(blocks)) == 1
        return len(blocks) if even else 1

    def of(self, size: int, key: str, hosts: GangHosts = ALONE) -> Gang:
        """Return the gang of this size on these hosts, started if necessary, to hold a policy.
        Raises the errors of `Gang`."""
        with self._lock:
            kind = (size, hosts.members)
            gang = self._gangs.get(kind)
            if gang is None or gang.lost:
                # End gangs without policies, to free their devices.
                for other in [one for one, keys in self._keys.items() if one != kind and not keys]:
                    self._end(other)
                self._keys[kind] = set()
                gang = self._gangs[kind] = Gang(self._settings, size, self._given_up, hosts, key)
            self._keys[kind].add(key)
            return gang

    def forget(self, gang: Gang, key: str) -> None:
        """Remove a policy from its ranks, which stay for the next policy if all are here."""
        with self._lock:
            kind = next((one for one, known in self._gangs.items() if known is gang), None)
            if kind is not None:
                self._keys[kind].discard(key)
                if kind[1] and not self._keys[kind]:
                    self._end(kind)
                    return
        with contextlib.suppress(Aborted):  # the ranks have ended already
            gang.order("close", key=key)

    def give_up(self) -> None:
        """Terminate all ranks permanently, from any thread; waiting calls fail."""
        self._given_up.set()
        # Without the lock, which is held while a new gang starts.
        for gang in list(self._gangs.values()):
            gang.end()

    def close(self) -> None:
        """End all ranks."""
        with self._lock:
            for kind in list(self._gangs):
                self._end(kind)
            if "transfer" in vars(self):  # it is made when it is first used
                self.transfer.close()

    def _end(self, kind: GangKind) -> None:
        self._keys.pop(kind, None)
        if gang := self._gangs.pop(kind, None):
            gang.close()


def main() -> None:
    """Run torchrun with the arguments of this process."""
    if parent := os.environ.get("TROUPE_PARENT_PID"):
        end_with_parent(int(parent))
    # Ranks are children of this process and must end with it, as it ends with the worker.
    os.environ["TROUPE_PARENT_PID"] = str(os.getpid())
    # Looked up in this process, which SIGTERM ends immediately: while the leader is away, a name
    # server may take longer to answer than the follower's grace period.
    if (leader := os.environ.get(_LEADER)) and (interface := interface_towards(leader)) is not None:
        # Gloo would listen at the address of the host's name, which may be loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:])
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        # The error says which rank failed first, and how.
        sys.exit(str(error))


if __name__ == "__main__":
    main()
