"""The gang of a worker as its service process sees it: processes that carry out orders together."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import structlog

from services.trainer.gang.frames import Channel, Frame
from services.trainer.gang.terms import Terms
from services.trainer.peers import Stopped
from services.trainer.settings import TrainerSettings
from troupe.rpc import Aborted, DeadlineExceeded, FailedPrecondition, from_status
from troupe.scratch import Scratch

log = structlog.get_logger("troupe.gang")

_POLL_SECONDS = 0.2
# After SIGTERM, before SIGKILL.
_GRACE_SECONDS = 5.0


class Gang:
    """Ranks under torchrun, from `Gang(...)` to `close`.

    They are children of this process, through torchrun, and end when it does. Several threads may
    give orders: one policy is suspended while another computes. Each waits for its turn, since
    answers say not whose they are.
    """

    def __init__(self, settings: TrainerSettings, size: int, given_up: threading.Event) -> None:
        """Start `size` ranks and wait for them: `TROUPE_GANG_START_SECONDS` at most, and not once
        it is `given_up`.

        Raises DeadlineExceeded of kind "gang_incomplete", or Aborted of kind "gang_lost".
        """
        self.size = size
        self._settings, self._given_up = settings, given_up
        self._ranks_here = size // settings.gang_nodes
        self._scratch = Scratch("troupe-gang-")
        self.directory = self._scratch.path
        self._channel: Channel | None = None
        self._turn = threading.RLock()
        self._files = itertools.count(1)
        self._agent: subprocess.Popen[bytes] | None = None
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                path = self.directory / "lead"
                listener.bind(str(path))
                listener.listen(1)
                self._agent = self._launch(Terms.of(settings, self._ranks_here, str(path)))
                self._gather(listener)
        except BaseException:
            self.close(orderly=False)
            raise

    @property
    def lost(self) -> bool:
        """Whether there is nobody left to give orders to."""
        return self._channel is None

    def order(
        self,
        name: str,
        body: bytes = b"",
        stop: threading.Event | None = None,
        **header: Any,
    ) -> Frame:
        """Have all ranks carry an order out; the answer of rank 0.

        Raises what they refuse it with, `Stopped` when `stop` was set, ValueError for state of
        another model, and Aborted of kind "gang_lost" when a rank has ended: then all are ended.
        """
        with self._turn:
            return self._in_turn(name, body, stop, header)

    def new_file(self) -> Path:
        """A name in memory that this host's ranks and this process share."""
        return self.directory / f"{next(self._files)}.safetensors"

    def close(self, *, orderly: bool = True) -> None:
        """End all ranks: ask them to leave, or at once, after what they are ordered. Idempotent."""
        with self._turn:
            self._close(orderly)

    def end(self) -> None:
        """Have all ranks end now, whatever they are at: the order that they carry out fails. From
        any thread; `close` is still to be called."""
        if self._agent is not None:
            self._agent.send_signal(signal.SIGTERM)

    # How.

    def _in_turn(
        self, name: str, body: bytes, stop: threading.Event | None, header: dict[str, Any]
    ) -> Frame:
        if self._channel is None:
            raise self._loss(f"'{name}' was not begun")
        if stop is not None and stop.is_set():
            raise Stopped
        try:
            self._channel.send(Frame({"order": name, **header}, body))
            answer = self._answer(name, stop)
        except (EOFError, OSError) as error:
            if not self._given_up.is_set():
                # torchrun ends the others and says who was first, if it is let.
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

    def _close(self, orderly: bool) -> None:
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
            self.end()
            if not self._ended() and self._agent is not None:
                _kill_all(self._agent)
        if channel is not None:
            channel.close()
        self._scratch.close()

    def _launch(self, terms: Terms) -> subprocess.Popen[bytes]:
        endpoint = self._settings.gang_endpoint
        host, _, port = endpoint.rpartition(":")
        try:
            number = int(port) or free_port(host)
        except (OSError, ValueError) as error:
            raise FailedPrecondition(
                f"ranks of a gang cannot meet at {endpoint}: {error}",
                kind="gang_endpoint_unusable",
                field="gang_endpoint",
                value=endpoint,
                remedy='Set TROUPE_GANG_ENDPOINT to "host:port" with an address of this host.',
            ) from error
        return launch(
            terms,
            ranks=self._ranks_here,
            nodes=self._settings.gang_nodes,
            node=0,
            address=host,
            port=number,
        )

    def _gather(self, listener: socket.socket) -> None:
        """Wait for rank 0, and with it for the others."""
        seconds, began = self._settings.gang_start_seconds, time.monotonic()
        came = 0
        listener.settimeout(_POLL_SECONDS)
        while time.monotonic() - began < seconds:
            self._check_agent(f"{came} of {self.size} ranks had come")
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
        nodes = self._settings.gang_nodes
        hosts = f"; they start once all {nodes} hosts are there" if nodes > 1 and not came else ""
        raise DeadlineExceeded(
            f"{came} of {self.size} ranks of a gang came within {seconds:g} s{hosts}",
            kind="gang_incomplete",
            field="gang_start_seconds",
            value=seconds,
            remedy="Look into the logs of the ranks that did not come; with several hosts, run "
            "`python -m services.trainer.gang` on each of the others.",
        )

    def _answer(self, name: str, stop: threading.Event | None) -> Frame:
        assert self._channel is not None
        told = 0.0
        while True:
            frame = self._channel.receive(_POLL_SECONDS)
            if frame is not None:
                return frame
            if self._over():
                raise EOFError
            if stop is None or not stop.is_set():
                continue
            if not told:
                told = time.monotonic()
                self._channel.send(Frame({"order": "stop"}))
            elif time.monotonic() - told > self._settings.gang_timeout_seconds:
                log.error("a gang does not stop", order=name)
                raise EOFError

    def _check_agent(self, what: str) -> None:
        if self._over():
            raise self._loss(what)

    def _over(self) -> bool:
        """Whether no answer can come any more."""
        there = self._agent is not None and self._agent.poll() is None
        return not there or self._given_up.is_set()

    def _ended(self) -> bool:
        """Whether torchrun, if it was begun at all, ends soon."""
        if self._agent is None:
            return True
        try:
            self._agent.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _loss(self, what: str) -> Aborted:
        return Aborted(
            f"a gang of {self.size} ranks was lost: {what}",
            kind="gang_lost",
            remedy="The step begins again from the last committed state, nothing was counted; the "
            "worker's log says which rank ended and why.",
        )


def launch(
    terms: Terms, *, ranks: int, nodes: int, node: int, address: str, port: int
) -> subprocess.Popen[bytes]:
    """torchrun for the ranks of this host, number `node` of `nodes`."""
    arguments = {
        "nnodes": nodes,
        "node-rank": node,
        "nproc-per-node": ranks,
        # Its dynamic one passes pickled state around; what has to be found out here is little.
        "rdzv-backend": "static",
        "master-addr": address,
        "master-port": port,
        "max-restarts": 0,
        "monitor-interval": 0.1,
        "shutdown-timeout": int(_GRACE_SECONDS) - 2,
    }
    options = [f"--{name}={value}" for name, value in arguments.items()]
    environment = {
        **os.environ,
        **terms.environment(),
        "TROUPE_PARENT_PID": str(os.getpid()),
        # The same number of ranks on each host: no need to ask.
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
    }
    agent = [sys.executable, "-m", "services.trainer.gang.agent", *options]
    return subprocess.Popen([*agent, "-m", "services.trainer.gang.rank"], env=environment)


def free_port(host: str) -> int:
    """A port that nobody listens on at `host` just now."""
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


def _kill_all(agent: subprocess.Popen[bytes]) -> None:
    """SIGKILL for torchrun; its ranks are killed with it."""
    log.error("ranks did not end, they are killed")
    agent.kill()
    agent.wait()
