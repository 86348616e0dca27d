"""A model's code cannot affect the answer of another call, nor forge its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.reward import worker
from services.reward.executor import WorkerProcess
from services.reward.sandboxes import seccomp
from services.reward.sandboxes.local import LocalProvider
from services.reward.sandboxes.manager import SandboxManager
from services.reward.sandboxes.profile import SandboxProfile
from tests.reward.test_reward_sandboxes import Trajectory, sandboxes_of
from tests.support.needs import BUBBLEWRAP
from troupe.v1 import reward_pb2 as reward_pb

Kind = reward_pb.InvocationError
pytestmark = [pytest.mark.asyncio(loop_scope="module"), BUBBLEWRAP]
TOOLS = {"memory_mib": 1024, "disk_mib": 64, "processes": 64, "version": "tools"}

# Looks into every process that it finds, writes an answer into every file that it can open, and
# continues. Its argument is the number of rounds.
ATTACK = r"""
import ctypes, glob, os, signal, struct, sys, time
body = b'["ok", "123.0", ""]'
frame = struct.pack(">I", len(body)) + body
report = '<testsuites><testsuite>' + '<testcase classname="t" name="t"/>' * 10
report += '</testsuite></testsuites>'
libc, me, opened = ctypes.CDLL(None), os.getpid(), []
for _ in range(int(sys.argv[1])):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == me:
            continue
        for path in (*glob.glob(f"/proc/{pid}/fd/*"), f"/proc/{pid}/mem"):
            try:
                file = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                opened.append(os.readlink(path))
                os.write(file, frame)
            except OSError:
                pass
        if libc.ptrace(16, int(pid), 0, 0) == 0:  # PTRACE_ATTACH
            opened.append("traced")
    for path in glob.glob("/tmp/tmp*/*.xml"):
        open(path, "w").write(report)
    for path in glob.glob("/tmp/work/test_*.py"):
        open(path, "w").write("def test_a(): pass\n" * 10)
    open("/tmp/beat", "w").write(str(time.time()))
    time.sleep(0.001)
print(opened)
"""
LEAVES_ATTACKERS = f"""
import os, subprocess, sys
for _ in range(3):
    subprocess.Popen(
        [sys.executable, "-c", {ATTACK!r}, "1000000"], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
if os.fork() == 0:  # twice away from whoever asked
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", {ATTACK!r}, "1000000"])
    os._exit(0)
while not os.path.exists("/tmp/beat"):
    pass
"""
# All tests pass, whatever they find.
CONFTEST = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
LEAVES_FILES = f"""
import os, site, sys
conftest = {CONFTEST!r}
lies = '''
import os, sys
for word in sys.argv + sys.orig_argv:
    if word.startswith("--junitxml="):
        with open(word.partition("=")[2], "w") as file:
            file.write("<testsuite>" + "<testcase/>" * 10 + "</testsuite>")
        if __name__ != "sitecustomize":
            os._exit(0)
'''
home = site.getusersitepackages()
for folder in (home, "/tmp", "/tmp/work", "/tmp/work/_pytest", "/tmp/work/pluggy"):
    os.makedirs(folder, exist_ok=True)
    for name in sys.argv[1:]:
        with open(f"{{folder}}/{{name}}.py", "w") as file:
            file.write(lies)
with open(f"{{home}}/lies.pth", "w") as file:
    file.write("import usercustomize")
for folder in ("/tmp", "/tmp/work", home):
    with open(f"{{folder}}/conftest.py", "w") as file:
        file.write(conftest)
    for name, head in (("pytest.ini", "[pytest]"), ("setup.cfg", "[tool:pytest]")):
        with open(f"{{folder}}/{{name}}", "w") as file:
            file.write(head + "\\naddopts = -p conftest\\npythonpath = /tmp\\n")
os.makedirs("/tmp/work/__pycache__", exist_ok=True)
print(os.listdir("/tmp/work"))
"""
WRONG = {
    "solution.py": "def solve(a, b):\n    return a - b\n",
    "test_solution.py": (
        "from solution import solve\n\ndef test_it():\n    assert solve(2, 2) == 4\n"
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes() -> AsyncIterator[SandboxManager]:
    async with sandboxes_of() as sandboxes:
        yield sandboxes


@pytest_asyncio.fixture(loop_scope="module")
async def mine(sandboxes: SandboxManager) -> AsyncIterator[Trajectory]:
    trajectory = Trajectory(sandboxes)
    yield trajectory
    trajectory.close()


async def tool(trajectory: Trajectory, name: str, **arguments: Any) -> Any:
    fields = {**TOOLS, "entrypoint": f"troupe.functions.library.code:{name}"}
    return await trajectory.call(name, fields, **arguments)


async def test_an_earlier_call_changes_no_reward(mine: Trajectory) -> None:
    ran = await tool(mine, "run_python", code=LEAVES_ATTACKERS)
    assert ran["exit_code"] == 0, ran
    entrypoint = {**TOOLS, "entrypoint": "hostile_functions:scores_slowly"}
    assert await mine.call("scores", entrypoint, seconds=0.5) == 0.0
    beat = await tool(mine, "run_python", code="print(open('/tmp/beat').read())")
    again = await tool(mine, "run_python", code="print(open('/tmp/beat').read())")
    assert beat["stdout"] == again["stdout"]
    lists = {**TOOLS, "entrypoint": "hostile_functions:lists"}
    processes = [name for name in await mine.call("lists", lists, path="/proc") if name.isdigit()]
    assert len(processes) == 2  # the first, and the one that looks


async def test_an_earlier_call_changes_no_test_report(mine: Trajectory) -> None:
    names = ["sitecustomize", "usercustomize", "pytest", "xdist", "_hypothesis"]
    test = {"paths": ["test_solution.py"]}
    right = {**WRONG, "solution.py": "def solve(a, b):\n    return a + b\n"}
    for more, isolated in ([], False), (["__init__", "doctest", "solution", "json"], True):
        for leaves in (LEAVES_FILES, LEAVES_ATTACKERS):
            (path,) = await tool(mine, "write_files", files={"leaves.py": leaves})
            ran = await tool(mine, "run_python", path=path, arguments=[*names, *more])
            assert ran["exit_code"] == 0, ran
        report = await tool(mine, "run_pytest", files=WRONG, isolated=isolated, **test)
        assert (report["passed"], report["failed"], report["exit_code"]) == (0, 1, 1), report
        report = await tool(mine, "run_pytest", files=right, isolated=isolated, **test)
        assert (report["passed"], report["failed"], report["exit_code"]) == (1, 0, 0), report


async def test_fixtures_and_settings_are_those_of_the_files(mine: Trajectory) -> None:
    own = {**WRONG, "conftest.py": "import pytest\n\n@pytest.fixture\ndef four():\n    return 4\n"}
    own["test_solution.py"] = "def test_it(four):\n    assert four == 5\n"
    report = await tool(mine, "run_pytest", paths=["test_solution.py"], files=own)
    assert (report["passed"], report["failed"]) == (0, 1), report
    await tool(mine, "write_files", files={"x/conftest.py": ""})
    error = await tool(mine, "run_pytest", paths=["test_solution.py"], files=own)
    assert "x/conftest.py is not one of `files`" in error.message


async def test_children_of_a_function_cannot_forge_its_answer(mine: Trajectory) -> None:
    entrypoint = {**TOOLS, "entrypoint": "hostile_functions:runs"}
    said = await mine.call("runs", entrypoint, code=ATTACK, arguments=["20"])
    assert said == "[]"


async def test_nor_in_a_sandbox_of_one_call() -> None:
    process = await WorkerProcess.start(
        await LocalProvider().launch("test", SandboxProfile("bubblewrap", 64, 16))
    )
    try:
        arguments = json.dumps({"code": ATTACK, "arguments": ["20"]})
        frame = {"entrypoint": "hostile_functions:runs", "arguments_json": arguments}
        process.send({"call": "prepare", "entrypoint": frame["entrypoint"]})
        assert (await process.answer()).kind == worker.OK
        process.send({"call": "invoke", "memory_mib": 0, **frame})
        answer = await process.answer()
    finally:
        await process.sandbox.stop()
    assert (answer.kind, json.loads(answer.text)) == (worker.OK, "[]")


async def test_a_call_that_times_out_leaves_no_process_behind_either(mine: Trajectory) -> None:
    late = {**TOOLS, "timeout_seconds": 1.5, "entrypoint": "hostile_functions:runs"}
    error = await mine.call("runs", late, code=LEAVES_ATTACKERS + "while True: pass", arguments=[])
    assert error.kind == Kind.KIND_TIMEOUT
    entrypoint = {**TOOLS, "entrypoint": "hostile_functions:scores_slowly"}
    assert await mine.call("scores", entrypoint, seconds=0.3) == 0.0


async def test_the_first_process_keeps_its_limits_and_cores(mine: Trajectory) -> None:
    code = (
        "import os, resource\n"
        "for what in (lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (1, 1)),\n"
        "             lambda: os.sched_setaffinity(1, {0}), lambda: os.setpriority(0, 1, 19),\n"
        "             lambda: os.kill(1, 9), lambda: os.kill(1, 19)):\n"
        "    try:\n        print(what())\n"
        "    except OSError as error:\n        print(error.errno)\n"
    )
    ran = await tool(mine, "run_python", code=code)
    said = ran["stdout"].split()
    assert said[3:] == ["None", "None"]
    if seccomp.filter_path() is not None:
        assert said[:3] == ["1", "1", "1"]
    assert await tool(mine, "write_files", files={"a": "b"}) == ["a"]
