"""Services on hosts that share only the network: no data_dir, no transfer_dir.

Hosts are directories on loopback or, for root, network namespaces as well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import psutil

from tests.support.ports import free_port
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "between hosts"


@dataclass
class Host:
    """A directory, and where its services are reached."""

    name: str
    directory: Path
    address: str = "127.0.0.1"
    # How this host reaches those that are on none.
    home: str = "127.0.0.1"
    namespace: str = ""

    @property
    def transfer(self) -> Path:
        """Its shared memory."""
        return self.directory / "transfer"

    @property
    def data(self) -> Path:
        """Its disk."""
        return self.directory / "data"

    def states(self) -> dict[str, bytes]:
        """The content of its transfer layer, by key."""
        return {
            path.relative_to(self.transfer).as_posix(): path.read_bytes()
            for path in self.transfer.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        }


@dataclass
class Hosts:
    """A cluster whose orchestrator, store and reward service are on a separate host."""

    directory: Path
    redis_url: str
    network: bool = False
    orchestrator: str = ""
    hosts: dict[str, Host] = field(default_factory=dict)
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _environments: dict[str, dict[str, str]] = field(default_factory=dict)
    _ports: dict[str, int] = field(default_factory=dict)

    def host(self, name: str) -> Host:
        """A host by name; made when it is new."""
        if name not in self.hosts:
            host = Host(name, self.directory / name)
            host.data.mkdir(parents=True)
            host.transfer.mkdir()
            if self.network and name != "home":
                separate(host, len(self.hosts))
            self.hosts[name] = host
        return self.hosts[name]

    def start(self, name: str, host: str, **environment: str) -> None:
        """Start the service `name` ("trainer-1") on a host, and wait until it serves."""
        where = self.host(host)
        port = self._ports.setdefault(name, free_port())
        settings = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TROUPE_HOST": "0.0.0.0" if self.network else "127.0.0.1",
            "TROUPE_TRANSFER_SERVE": "on",
            "TROUPE_PORT": str(port),
            "TROUPE_ADVERTISE_ADDRESS": f"{where.address}:{port}",
            "TROUPE_TOKEN": TOKEN,
            "TROUPE_REDIS_URL": self.redis_url,
            "TROUPE_DATA_DIR": str(where.data),
            "TROUPE_TRANSFER_DIR": str(where.transfer),
            "TROUPE_PORT_FILE": str(where.directory / f"{name}.port"),
            "TROUPE_PARENT_PID": str(os.getpid()),
            "TROUPE_DRAIN_SECONDS": "1",
            "TROUPE_HEARTBEAT_SECONDS": "0.2",
            "TROUPE_LOST_AFTER_BEATS": "8",
            **{
                f"TROUPE_{one.upper()}_ADDRESS": f"{where.home}:{self._ports[one]}"
                for one in ("orchestrator", "experience_store", "reward")
                if one in self._ports
            },
            **environment,
        }
        self._environments[name] = {"host": host, **environment}
        command = [sys.executable, "-m", f"services.{name.partition('-')[0]}"]
        if where.namespace:
            command = ["ip", "netns", "exec", where.namespace, *command]
        with (self.directory / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
                stdout=log,
                stderr=log,
            )
        self._until_ready(name, where)

    def core(self) -> None:
        """Start the services other than workers, on the host "home"."""
        for name in ("orchestrator", "experience_store", "reward"):
            self._ports[name] = free_port()
        for name in ("experience_store", "reward", "orchestrator"):
            self.start(name, "home")
        self.orchestrator = f"127.0.0.1:{self._ports['orchestrator']}"

    def kill(self, name: str) -> None:
        """SIGKILL, as a crash; its owner process goes with it."""
        process = self._running.pop(name)
        process.kill()
        process.wait(PATIENCE)
        self._port_file(name).unlink(missing_ok=True)

    def restart(self, name: str) -> None:
        """Start a service that was killed, on its host."""
        environment = dict(self._environments[name])
        self.start(name, environment.pop("host"), **environment)

    def owner(self, name: str) -> psutil.Process:
        """The owner process that a service runs."""
        children = psutil.Process(self._running[name].pid).children(recursive=True)
        return next(c for c in children if "troupe.transfer.remote" in " ".join(c.cmdline()))

    def log(self, name: str) -> str:
        """Return a service's log."""
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def metrics(self, name: str) -> str:
        """A service's `/metrics`."""
        host = self.hosts[self._environments[name]["host"]]
        port = self._port_file(name).read_text().split()[1]
        with urlopen(f"http://{host.address}:{port}/metrics", timeout=PATIENCE) as reply:
            return str(reply.read().decode())

    def close(self) -> None:
        """Stop everything."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(20)  # deadline: it is killed then
            except subprocess.TimeoutExpired:
                process.kill()
        for host in self.hosts.values():
            rejoin(host)

    def _port_file(self, name: str) -> Path:
        host = self.hosts[self._environments[name]["host"]]
        return host.directory / f"{name}.port"

    def _until_ready(self, name: str, host: Host) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self._port_file(name).exists():
            status = self._running[name].poll()
            assert status is None, f"{name} ended with {status}:\n{self.log(name)[-4000:]}"
            assert time.monotonic() < deadline, f"{name}:\n{self.log(name)[-4000:]}"
            time.sleep(0.05)


@contextmanager
def apart(directory: Path, redis_url: str, *, network: bool = False) -> Iterator[Hosts]:
    """A cluster without workers; `network`: hosts have a network of their own."""
    hosts = Hosts(directory, redis_url, network)
    try:
        hosts.core()
        yield hosts
    finally:
        hosts.close()


def may_separate() -> bool:
    """Whether network namespaces can be made here."""
    if os.geteuid() != 0:
        return False
    probe = f"troupe-{os.getpid()}-probe"
    try:
        if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
            return False
        return not subprocess.run(["ip", "netns", "delete", probe], capture_output=True).returncode
    except OSError:
        return False


def separate(host: Host, number: int) -> None:
    """A namespace of its own, with a way to the others through this one."""
    mark = f"{os.getpid() % 10000}{number}"
    net = f"10.{80 + os.getpid() % 100}.{number}"
    host.namespace, host.address, host.home = f"troupe-{mark}", f"{net}.2", f"{net}.1"
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    _ip("netns", "add", host.namespace)
    _ip("link", "add", f"th{mark}", "type", "veth", "peer", "name", f"tp{mark}")
    _ip("link", "set", f"tp{mark}", "netns", host.namespace)
    _ip("addr", "add", f"{net}.1/24", "dev", f"th{mark}")
    _ip("link", "set", f"th{mark}", "up")
    inside = ("-n", host.namespace)
    _ip(*inside, "addr", "add", f"{net}.2/24", "dev", f"tp{mark}")
    _ip(*inside, "link", "set", f"tp{mark}", "up")
    _ip(*inside, "link", "set", "lo", "up")
    _ip(*inside, "route", "add", "default", "via", f"{net}.1")


def rejoin(host: Host) -> None:
    """Inverse of `separate`."""
    if host.namespace:
        _ip("netns", "delete", host.namespace)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
