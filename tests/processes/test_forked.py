"""Programs that are forked from a process which has imported their modules."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.processes import runs
from tests.support.waiting import PATIENCE, until
from troupe.processes.ending import stop_process_async
from troupe.processes.forked import ForkedProcess, ForkServer, can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="needs Linux with pidfds")

PROGRAMS = {
    # Counts its imports in a file that all processes share.
    "heavy": "open('imports', 'a').write('x')\nANSWER = 42\n",
    "late": "import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.01)\n",
    "says": """
        import heavy, json, os, sys, threading
        import numpy
        print(json.dumps({
            "answer": heavy.ANSWER, "name": __name__, "module": __spec__.name, "argv": sys.argv[1:],
            "environment": dict(os.environ), "session": os.getsid(0), "pid": os.getpid(),
            "drawn": float(numpy.random.random()), "threads": threading.active_count(),
        }), flush=True)
        sys.exit(3)
    """,
    "stays": """
        import signal, sys, time
        def end(*_):
            print("told to end", flush=True)
            sys.exit(5)
        signal.signal(signal.SIGTERM, end)
        print("stays", flush=True)
        while True:
            time.sleep(600)
    """,
}


class Place:
    """A directory with programs, and the fork server that runs there."""

    def __init__(self, directory: Path, modules: list[str]) -> None:
        self.directory = directory
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(directory), *sys.path]),
        }
        self.server = ForkServer({"all": modules}, self.environment)

    async def start(self) -> int:
        """Start the server; return its process id."""
        before = {one.pid for one in psutil.Process().children()}
        with (self.directory / "server.log").open("ab") as log:
            await self.server.start(log)  # type: ignore[arg-type]
        [pid] = {one.pid for one in psutil.Process().children()} - before
        return pid

    async def fork(
        self, module: str, *needs: str, group: str = "all", more: Mapping[str, str] | None = None
    ) -> ForkedProcess:
        """Fork a program, with the variables `more`."""
        async with asyncio.timeout(PATIENCE):
            return await self.server.fork(
                group, module, {**self.environment, **(more or {})}, self.log(module), needs
            )

    def log(self, module: str) -> Path:
        """The output of a program."""
        return self.directory / f"{module}.log"

    async def until_said(self, module: str, text: str, times: int = 1) -> None:
        """Wait until programs have printed `text` so many times."""
        log = self.log(module)
        await until(lambda: log.exists() and log.read_text().count(text) == times)


def mapped(pid: int) -> str:
    """The files that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text()


def is_server(process: psutil.Process) -> bool:
    return "troupe.processes.fork_server" in process.cmdline()


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.chdir(tmp_path)
    for name, text in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    made = Place(tmp_path, ["heavy", "numpy"])
    yield made
    await made.server.stop()


async def test_forked_programs_run_as_modules_and_share_the_imports(place: Place) -> None:
    server = await place.start()
    said: list[dict[str, Any]] = []
    for number in ("1", "2"):
        process = await place.fork("says", "heavy", "numpy", more={"NUMBER": number})
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == 3
        said.append(json.loads(place.log("says").read_text().splitlines()[-1]))
        assert process.returncode == 3
        assert said[-1]["pid"] == process.pid

    assert (place.directory / "imports").read_text() == "x"
    for number, one in zip(("1", "2"), said, strict=True):
        assert (one["name"], one["module"], one["argv"]) == ("__main__", "says", [])
        assert one["environment"] == {**place.environment, "NUMBER": number}
        assert one["session"] == one["pid"] != server
        assert (one["answer"], one["threads"]) == (42, 1)
    assert said[0]["drawn"] != said[1]["drawn"]


async def test_a_program_starts_before_modules_that_it_does_not_need(place: Place) -> None:
    place.server = ForkServer({"all": ["late", "heavy"]}, place.environment)
    await place.start()
    await place.fork("stays", "heavy")
    await place.until_said("stays", "stays")
    assert (place.directory / "imports").exists()
    place.directory.joinpath("go").touch()  # only now `late` can be imported
    await stop_process_async(await place.fork("stays", "late"), PATIENCE)


async def test_servers_of_two_groups_share_the_common_modules_and_end_together(
    place: Place,
) -> None:
    groups = {"one": ["late"], "two": ["numpy"]}
    place.server = ForkServer(groups, place.environment, ["heavy"])
    server = await place.start()
    # The second server goes on while the first one cannot.
    process = await place.fork("says", "heavy", "numpy", group="two")
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() == 3
    place.directory.joinpath("go").touch()
    process = await place.fork("says", "heavy", "late", group="one")
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() == 3
    assert (place.directory / "imports").read_text() == "x"
    servers = [server, *(one.pid for one in psutil.Process(server).children())]
    assert len(servers) == 2

    await place.server.stop()

    assert not any(runs(pid) for pid in servers)


async def test_a_server_that_rests_drops_its_imports_and_keeps_its_programs(place: Place) -> None:
    place.server = ForkServer(
        {"all": ["numpy"]}, place.environment, ["heavy"], rest_seconds={"all": 0.1}
    )
    server = await place.start()
    process = await place.fork("stays", "heavy", "numpy")
    await place.until_said("stays", "stays")
    await until(lambda: "--resume" in psutil.Process(server).cmdline())

    # It imports again what a program needs, and learns the ends of old and new programs.
    said = await place.fork("says", "heavy", "numpy")
    async with asyncio.timeout(PATIENCE):
        assert await said.wait() == 3
    assert json.loads(place.log("says").read_text())["answer"] == 42
    assert (place.directory / "imports").read_text() == "xx"
    assert runs(process.pid)
    assert await stop_process_async(process, PATIENCE) == 5

    # Again, and it ends with its owner, after its programs.
    last = await place.fork("stays", "heavy")
    await place.until_said("stays", "stays", times=2)
    await until(lambda: "numpy" not in mapped(server))
    await place.server.stop()
    assert not runs(server)
    async with asyncio.timeout(PATIENCE):
        await last.wait()
    await place.until_said("stays", "told to end", times=2)


async def test_two_servers_rest_and_end_together(place: Place) -> None:
    groups = {"one": ["numpy"], "two": ["numpy"]}
    rest = dict.fromkeys(groups, 0.1)
    place.server = ForkServer(groups, place.environment, ["heavy"], rest)
    first = await place.start()
    for group in groups:
        await place.fork("stays", "heavy", group=group)
    await place.until_said("stays", "stays", times=2)
    servers = [first, *(one.pid for one in psutil.Process(first).children() if is_server(one))]
    assert len(servers) == 2
    await until(lambda: all("--resume" in psutil.Process(one).cmdline() for one in servers))
    await place.server.stop()
    assert not any(runs(one) for one in servers)
    await place.until_said("stays", "told to end", times=2)


async def test_a_forked_program_is_shown_under_its_own_name(place: Place) -> None:
    await place.start()
    process = await place.fork("stays")
    await place.until_said("stays", "stays")
    assert psutil.Process(process.pid).cmdline()[1:3] == ["-m", "stays"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 5), (signal.SIGKILL, -9)])
async def test_a_signal_ends_one_forked_program_and_no_other(
    place: Place, number: signal.Signals, status: int
) -> None:
    await place.start()
    first, second = [await place.fork("stays") for _ in range(2)]
    await place.until_said("stays", "stays", times=2)

    first.terminate() if number == signal.SIGTERM else first.kill()

    async with asyncio.timeout(PATIENCE):
        assert await first.wait() == status
    assert not runs(first.pid)
    assert runs(second.pid)
    first.kill()  # a late signal reaches no other process of the same number
    assert await stop_process_async(second, PATIENCE) == 5


async def test_a_killed_server_leaves_its_programs_running_and_their_end_is_noticed(
    place: Place,
) -> None:
    server = await place.start()
    process = await place.fork("stays")
    await place.until_said("stays", "stays")

    os.kill(server, signal.SIGKILL)
    await until(lambda: not runs(server))
    with pytest.raises(OSError, match=r"ended|pipe|reset"):
        await place.fork("stays")

    assert runs(process.pid)
    assert process.returncode is None
    process.terminate()
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() == 255  # only a parent learns the status


async def test_programs_of_a_stopped_server_are_told_to_end(place: Place) -> None:
    server = await place.start()
    process = await place.fork("stays")
    await place.until_said("stays", "stays")

    await place.server.stop()

    assert not runs(server)
    async with asyncio.timeout(PATIENCE):
        await process.wait()
    await place.until_said("stays", "told to end")


async def test_programs_end_when_the_owner_of_their_server_is_killed(place: Place) -> None:
    program = textwrap.dedent(
        """
        import asyncio, os, sys
        from pathlib import Path
        from troupe.processes.forked import ForkServer
        async def main():
            server = ForkServer({"all": []}, os.environ)
            with open("server.log", "ab") as log:
                await server.start(log)
            process = await server.fork("all", "stays", os.environ, Path("stays.log"))
            print(process.pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
        """
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, env=place.environment, stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    async with asyncio.timeout(PATIENCE):
        pid = int(await owner.stdout.readline())
    await place.until_said("stays", "stays")

    owner.kill()
    await owner.wait()

    await until(lambda: not runs(pid))
    await place.until_said("stays", "told to end")


async def test_a_module_that_cannot_be_imported_does_not_end_the_server(place: Place) -> None:
    place.server = ForkServer({"all": ["no_such_module"]}, place.environment)
    await place.start()
    process = await place.fork("stays", "no_such_module")
    await place.until_said("stays", "stays")
    await stop_process_async(process, PATIENCE)
    assert "no_such_module cannot be imported" in (place.directory / "server.log").read_text()
