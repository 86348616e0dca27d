"""The supervisor against real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.processes import runs
from tests.support.waiting import PATIENCE, until
from troupe.cluster import child as child_module
from troupe.cluster.child import Child, ChildState
from troupe.cluster.embedded import pick_ports
from troupe.cluster.errors import ChildFailed, ChildNotReady
from troupe.cluster.layout import ChildSpec
from troupe.cluster.probes import Probe, ProbeKind
from troupe.cluster.supervisor import Supervisor

SERVER = textwrap.dedent(
    """
    import http.server, os, signal, sys
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
        def log_message(self, *_): pass
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("words of", sys.argv[2], flush=True)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
    """
)


def spec(name: str, port: int, script: str = SERVER, **settings: object) -> ChildSpec:
    return ChildSpec(
        name=name,
        command=(sys.executable, "-c", script, str(port), name),
        probe=Probe(ProbeKind.HTTP, f"127.0.0.1:{port}"),
        address=f"127.0.0.1:{port}",
        **{"start_seconds": 60.0, "stop_seconds": 10.0, **settings},  # type: ignore[arg-type]
    )


class Recorder:
    """Remembers every move and every event of a supervisor's children."""

    def __init__(self) -> None:
        self.moves: list[tuple[str, ChildState]] = []
        self.events: list[str] = []

    def __call__(self, child: Child, event: str) -> None:
        if (child.spec.name, child.state) not in self.moves[-1:]:
            self.moves.append((child.spec.name, child.state))
        if event:
            self.events.append(event)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Callable[..., tuple[Supervisor, Recorder]]]:
    made: list[Supervisor] = []

    def make(*specs: ChildSpec) -> tuple[Supervisor, Recorder]:
        recorder = Recorder()
        made.append(Supervisor(specs, tmp_path / "logs", recorder))
        return made[-1], recorder

    yield make
    for supervisor in made:
        await supervisor.stop()


async def test_children_start_in_order_and_stop_in_reverse(run) -> None:  # type: ignore[no-untyped-def]
    ports = pick_ports("abc")
    supervisor, recorder = run(
        spec("a", ports["a"]),
        spec("b", ports["b"], after=("a",)),
        spec("c", ports["c"], after=("b",)),
    )

    await supervisor.start()
    pids = [c.pid for c in supervisor.children.values()]
    await supervisor.stop()

    def order(state: ChildState) -> list[str]:
        return [name for name, s in recorder.moves if s == state]

    assert order(ChildState.SERVING) == ["a", "b", "c"]
    assert order(ChildState.STOPPED) == ["c", "b", "a"]
    assert recorder.moves.index(("a", ChildState.SERVING)) < recorder.moves.index(
        ("b", ChildState.STARTING)
    )
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_killed_child_comes_back_at_the_same_address(run) -> None:  # type: ignore[no-untyped-def]
    port = pick_ports(["a"])["a"]
    supervisor, recorder = run(spec("a", port))
    await supervisor.start()
    child = supervisor.children["a"]

    for lives in (1, 2):
        os.kill(child.pid, signal.SIGKILL)

        def back(lives: int = lives) -> bool:
            return bool(child.restarts == lives and child.state == "serving")

        await until(back)
        assert await child.spec.probe.ask(2.0) is None

    assert "a was killed by SIGKILL" in recorder.events[0]
    assert recorder.events[1] == "a is back"


async def test_processes_that_a_dead_child_started_are_ended(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    note = tmp_path / "grandchild"
    script = (
        "import subprocess, sys, pathlib\n"
        "p = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(note)!r}).write_text(str(p.pid))\n" + SERVER
    )
    supervisor, _ = run(spec("a", pick_ports(["a"])["a"], script))
    await supervisor.start()
    grandchild = int(note.read_text())

    os.kill(supervisor.children["a"].pid, signal.SIGKILL)

    await until(lambda: int(note.read_text()) != grandchild)
    assert not runs(grandchild)
    last = int(note.read_text())
    await supervisor.stop()
    await until(lambda: not runs(last))


async def test_a_child_that_does_not_start_stops_the_rest_and_says_why(run) -> None:  # type: ignore[no-untyped-def]
    ports = pick_ports("ab")
    broken = "import sys; print('no module named magic', flush=True); sys.exit(3)"
    supervisor, _ = run(spec("a", ports["a"]), spec("b", ports["b"], broken, after=("a",)))

    with pytest.raises(ChildFailed) as caught:
        await supervisor.start()

    assert "exited with status 3 before it was ready" in str(caught.value)
    assert "no module named magic" in str(caught.value)
    assert "b.log" in str(caught.value)
    assert supervisor.children["a"].state == ChildState.STOPPED


async def test_a_child_that_is_never_ready_fails_at_its_deadline(run) -> None:  # type: ignore[no-untyped-def]
    mute = "import time; time.sleep(600)"
    port = pick_ports(["a"])["a"]
    supervisor, _ = run(spec("a", port, mute, start_seconds=0.4))

    with pytest.raises(ChildNotReady) as caught:
        await supervisor.start()

    assert f"not ready at 127.0.0.1:{port} within 0.4 s" in str(caught.value)
    assert supervisor.children["a"].pid is None


async def test_a_child_has_the_time_to_read_its_files(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Such as a Redis with a large append-only file."""
    (tmp_path / "data").mkdir()
    with (tmp_path / "data" / "sparse").open("wb") as file:
        file.truncate(2_000_000_000)
    slow = "import time; time.sleep(2)\n" + SERVER
    port = pick_ports(["a"])["a"]
    supervisor, _ = run(spec("a", port, slow, start_seconds=0.4, reads=tmp_path / "data"))
    await supervisor.start()
    assert supervisor.children["a"].state == ChildState.SERVING


async def test_a_child_that_dies_again_and_again_is_given_up(run, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(child_module, "FIRST_BACKOFF", 0.01)
    port = pick_ports(["a"])["a"]
    supervisor, _ = run(spec("a", port, max_restarts=2))
    await supervisor.start()
    child = supervisor.children["a"]

    async def killer() -> None:
        while child.state != ChildState.FAILED:
            if child.state == ChildState.SERVING:
                # It may be dead since the last round, and the supervisor not know it yet.
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
            await asyncio.sleep(0.05)

    async with asyncio.timeout(PATIENCE):
        failure, _ = await asyncio.gather(supervisor.failure(), killer())

    assert "died 3 times" in str(failure)
    assert "words of a" in str(failure)


async def test_a_power_cut_ends_all_and_brings_nobody_back(run) -> None:  # type: ignore[no-untyped-def]
    ports = pick_ports("ab")
    supervisor, recorder = run(spec("a", ports["a"]), spec("b", ports["b"], after=("a",)))
    await supervisor.start()
    pids = [c.pid for c in supervisor.children.values()]

    await supervisor.kill()

    assert not any(runs(pid) for pid in pids)
    await asyncio.sleep(0.5)  # longer than the first pause before a restart
    assert recorder.events == []
    assert all(c.state == ChildState.STOPPED for c in supervisor.children.values())


async def test_a_child_that_ignores_sigterm_is_killed_at_its_deadline(run) -> None:  # type: ignore[no-untyped-def]
    stubborn = SERVER.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
    supervisor, _ = run(spec("a", pick_ports(["a"])["a"], stubborn, stop_seconds=0.3))
    await supervisor.start()
    pid = supervisor.children["a"].pid

    await supervisor.stop()

    assert not runs(pid)


async def test_cancelling_the_start_leaves_nothing_behind(run) -> None:  # type: ignore[no-untyped-def]
    ports = pick_ports("ab")
    mute = "import time; time.sleep(600)"
    supervisor, _ = run(spec("a", ports["a"]), spec("b", ports["b"], mute, after=("a",)))
    starting = asyncio.create_task(supervisor.start())
    await until(lambda: supervisor.children["b"].pid is not None)
    pids = [c.pid for c in supervisor.children.values()]

    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting

    assert not any(runs(pid) for pid in pids)


async def test_children_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    port = pick_ports(["a"])["a"]
    program = textwrap.dedent(
        f"""
        import asyncio, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_cluster_supervisor import spec
        from troupe.cluster.supervisor import Supervisor
        # A child that does not watch its parent: only the kernel can end it.
        script = "import os, time; print(os.getpid(), flush=True);" + {_HTTP_FOREVER!r}
        async def main():
            supervisor = Supervisor([spec("a", {port}, script)], Path({str(tmp_path)!r}))
            await supervisor.start()
            print(supervisor.children["a"].pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
        """
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        pid = int(await process.stdout.readline())
    assert runs(pid)

    process.kill()
    await process.wait()

    await until(lambda: not runs(pid))


_HTTP_FOREVER = (
    "import http.server as h, sys\n"
    "class P(h.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200); self.end_headers()\n"
    "h.HTTPServer(('127.0.0.1', int(sys.argv[1])), P).serve_forever()\n"
)


def test_an_order_that_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="b must come after a"):
        Supervisor([spec("b", 1, after=("a",)), spec("a", 2)], tmp_path)


@pytest.mark.parametrize(("attempts", "good"), [(4, True), (3, False), (1, False)])
async def test_a_child_that_ends_early_is_started_as_often_as_allowed(
    run: Callable[..., tuple[Supervisor, Recorder]], tmp_path: Path, attempts: int, good: bool
) -> None:
    dies_thrice = textwrap.dedent(
        f"""
        import os, sys
        log = os.open({str(tmp_path / "starts")!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(log, b"x")
        if os.fstat(log).st_size <= 3:
            sys.exit(9)
        """
    )
    [port] = pick_ports(["a"]).values()
    supervisor, recorder = run(spec("a", port, dies_thrice + SERVER, start_attempts=attempts))
    if good:
        await supervisor.start()
        assert recorder.events == ["a ended before it was ready; restarting it"] * 3
    else:
        with pytest.raises(ChildFailed, match="exited with status 9 before it was ready"):
            await supervisor.start()
    assert (tmp_path / "starts").stat().st_size == attempts
