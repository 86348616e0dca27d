"""Hosts of one machine: network namespaces with links of a given speed. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path

from benchmarks.transfer.measure import TCP, Pair, in_turns
from benchmarks.transfer.processes import cores_of, line, other, tell

# Rate of each host's link in either direction with several readers: slow enough that the links, and
# not the two cores of a small machine, are the bottleneck.
LINK_MBIT = 400


def why_not() -> str:
    """Return the reason why namespaces are impossible; empty if they are possible."""
    if os.geteuid() != 0:
        return "not root"
    return "" if shutil.which("ip") and shutil.which("tc") else "no ip or tc"


class Network:
    """`count` hosts on one bridge, each in a namespace: `address(k)`, and commands `within(k)`."""

    def __init__(self, count: int, mbit: int = 0) -> None:
        """`mbit`: rate of each link in either direction; 0: unlimited. Raises
        CalledProcessError."""
        self._name = f"tx{os.getpid() % 10000}"
        self._count, self._mbit = count, mbit

    def __enter__(self) -> Network:
        name = self._name
        try:
            _run(f"ip link add {name}br type bridge")
            _run(f"ip link set {name}br up")
            for k in range(self._count):
                inside, outside = f"{name}i{k}", f"{name}o{k}"
                _run(f"ip netns add {name}n{k}")
                _run(f"ip link add {outside} type veth peer name {inside}")
                _run(f"ip link set {inside} netns {name}n{k}")
                _run(f"ip link set {outside} master {name}br up")
                within = f"ip netns exec {name}n{k}"
                _run(f"{within} ip addr add {self.address(k)}/24 dev {inside}")
                _run(f"{within} ip link set {inside} up")
                _run(f"{within} ip link set lo up")
                if self._mbit:
                    limit = f"root tbf rate {self._mbit}mbit burst 512kb latency 100ms"
                    _run(f"{within} tc qdisc add dev {inside} {limit}")
                    _run(f"tc qdisc add dev {outside} {limit}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for k in range(self._count):
            # The kernel would delete a namespace's links only later.
            _run(f"ip link delete {self._name}o{k}", check=False)
            _run(f"ip netns delete {self._name}n{k}", check=False)
        _run(f"ip link delete {self._name}br", check=False)

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"10.213.7.{host + 1}"

    def within(self, host: int) -> list[str]:
        """Return the prefix of a command that runs on the host."""
        return ["ip", "netns", "exec", f"{self._name}n{host}"]


def between_two(num_bytes: int, rounds: int, directory: Path) -> Pair:
    """Measure two hosts over TCP: by `Transfer`, with and without checksums, and by bare UCX."""
    with Network(2) as net, ExitStack() as stack:

        def on(host: int, what: str, *arguments: object) -> subprocess.Popen[str]:
            within, cores = net.within(host), cores_of(host)
            return stack.enter_context(other(what, *arguments, env=TCP, within=within, cores=cores))

        near = 0
        receiver = on(1, "receive_raw", directory, num_bytes, near)
        owner = on(0, "serve", directory / "netowner", num_bytes, 1, net.address(0))
        sender = on(0, "send_raw", directory / "netowner", num_bytes, line(receiver), near)
        address = line(owner)
        readers = [on(1, "fetch", directory / f"netreader{v}", address, 1, v) for v in (1, 0)]
        return in_turns(sender, receiver, owner, readers, rounds)


def four_readers(num_bytes: int, rounds: int, directory: Path) -> tuple[float, float]:
    """Return the seconds until one other host, and until all four, have a version."""
    with Network(5, LINK_MBIT) as net, ExitStack() as stack:
        arguments = (directory / "treeowner", num_bytes, 0, net.address(0))
        owner = stack.enter_context(other("serve", *arguments, within=net.within(0)))
        address = line(owner)
        readers = [
            stack.enter_context(
                other(
                    "host",
                    directory / f"treereader{k}",
                    address,
                    net.address(k),
                    within=net.within(k),
                )
            )
            for k in range(1, 5)
        ]
        for reader in readers:
            line(reader)
        ones, fours = [], []
        for version in range(0, 2 * rounds, 2):
            ones.append(_all(owner, readers[:1], version))
            fours.append(_all(owner, readers, version + 1))
        return min(ones), min(fours)


def _all(owner: subprocess.Popen[str], readers: list[subprocess.Popen[str]], version: int) -> float:
    tell(owner, version)
    line(owner)
    taken: list[float] = []

    def ask(reader: subprocess.Popen[str]) -> None:
        tell(reader, version)
        taken.append(float(line(reader).split()[0]))

    threads = [threading.Thread(target=ask, args=[reader]) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(taken) < len(readers):
        raise RuntimeError("a reader of the benchmark died")
    return max(taken)


def _run(command: str, *, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, capture_output=True)
