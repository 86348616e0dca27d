"""Uploaded source: known by its hash, never mixed up, refused where it makes no sense."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.reward import worker
from services.reward.sandboxes import supervisor
from services.reward.sandboxes.container import BOOT, command_frame, file_frame
from tests.reward.test_reward_service import Client, client_of
from tests.support.needs import BUBBLEWRAP
from tests.support.waiting import PATIENCE
from troupe.functions.sources import SourceStore, digest
from troupe.rpc import AlreadyExists, InvalidArgument, NotFound, new_id
from troupe.v1 import reward_pb2 as reward_pb

pytestmark = pytest.mark.asyncio(loop_scope="module")


def files(texts: dict[str, str]) -> list[reward_pb.SourceFile]:
    return [reward_pb.SourceFile(path=path, content=text.encode()) for path, text in texts.items()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    async with client_of(reward_workers=2) as client:
        yield client


async def upload(client: Client, texts: dict[str, str]) -> str:
    request = reward_pb.UploadSourceRequest(request_id=new_id(), files=files(texts))
    return (await client.stub.UploadSource(request)).sha256


async def run(client: Client, sha256: str, **fields: Any) -> Any:
    fields = {"entrypoint": "scoring:score", "source_sha256": sha256, **fields}
    return await client.run("uploaded", {"x": 1}, **fields)


async def test_versions_with_the_same_modules_never_meet(client: Client) -> None:
    # Each has a package of the same name, which the module imports.
    text = "from shared.rule import plus\ndef score(x):\n    return x + plus\n"
    for plus in (10, 20, 10):
        sha = await upload(
            client,
            {"scoring.py": text, "shared/__init__.py": "", "shared/rule.py": f"plus = {plus}\n"},
        )
        assert await run(client, sha) == 1 + plus


async def test_the_same_name_and_version_with_other_source_is_refused(client: Client) -> None:
    first = await upload(client, {"scoring.py": "def score(x):\n    return 1\n"})
    other = await upload(client, {"scoring.py": "def score(x):\n    return 2\n"})
    assert await run(client, first, version="fixed") == 1
    with pytest.raises(AlreadyExists):
        await run(client, other, version="fixed")
    assert await run(client, first, version="fixed") == 1


async def test_source_that_does_not_import_is_a_typed_error(client: Client) -> None:
    sha = await upload(client, {"scoring.py": "import no_such_module\n"})
    error = await run(client, sha)
    assert error.kind == reward_pb.InvocationError.KIND_NOT_IMPORTABLE
    assert "No module named 'no_such_module'" in error.message


async def test_source_that_was_not_uploaded_is_not_found(client: Client) -> None:
    with pytest.raises(NotFound) as missing:
        await run(client, "0" * 64)
    assert missing.value.kind == "source_not_found"
    with pytest.raises(InvalidArgument) as wrong:
        await run(client, "../../etc")
    assert wrong.value.field == "function.source_sha256"


@pytest.mark.parametrize("sandbox", ["process", pytest.param("bubblewrap", marks=BUBBLEWRAP)])
async def test_source_runs_nothing_before_its_worker_is_ready(client: Client, sandbox: str) -> None:
    shadows = ("json", "inspect", "struct", "traceback", "resource", "random", "subprocess")
    texts = {f"{name}.py": "raise ImportError(__file__)\n" for name in shadows}
    texts["sitecustomize.py"] = "import os\nos._exit(9)\n"
    texts["usercustomize.py"] = texts["sitecustomize.py"]
    texts["scoring.py"] = (
        "import os\n"
        "def score(x):\n"
        "    first = os.environ['PYTHONPATH'].split(os.pathsep)[0]\n"
        "    return [x, first == os.path.dirname(__file__)]\n"
    )
    sha = await upload(client, texts)
    assert await run(client, sha, sandbox=sandbox) == [1, True]


@BUBBLEWRAP
async def test_a_sandbox_reads_it_and_cannot_change_it(client: Client) -> None:
    text = (
        "import pathlib\n"
        "def score(x):\n"
        "    try:\n"
        "        pathlib.Path(__file__).write_text('')\n"
        "    except OSError as error:\n"
        "        return type(error).__name__\n"
    )
    sha = await upload(client, {"scoring.py": text})
    result = await run(client, sha, sandbox="bubblewrap")
    if (
        isinstance(result, reward_pb.InvocationError)
        and "namespace" in result.message + result.output
    ):
        pytest.skip(f"no user namespaces here: {result.output}")
    assert result == "OSError", result


# Modules that the interpreter or the worker itself would import before it is confined.
ACTS_AT_START = """
import os, resource
limits = [resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1] for name in ("CORE", "NOFILE")]
try:
    read = open({secret!r}).read()
except OSError as error:
    read = type(error).__name__
os.environ["AT_START"] = repr([limits, read])
"""
CALLED = """
import os, subprocess, sys
def score(x):
    code = "import os; print(os.environ.get('AT_START'), end='')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return [os.environ.get("AT_START"), child.stdout or child.stderr]
"""
SHADOWS = ("inspect", "json", "resource", "select", "selectors", "struct", "traceback", "types")


@BUBBLEWRAP
@pytest.mark.parametrize("sandbox", ["bubblewrap", "process"])
async def test_source_that_acts_at_import_runs_within_the_limits_only(
    client: Client, tmp_path: Path, sandbox: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("read")
    acts = ACTS_AT_START.format(secret=str(secret))
    sha = await upload(client, {"sitecustomize.py": acts, "scoring.py": CALLED})
    confined = {"reads": ["/usr/share"]} if sandbox == "process" else {}
    result = await run(client, sha, sandbox=sandbox, **confined)
    if (
        isinstance(result, reward_pb.InvocationError)
        and "namespace" in result.message + result.output
    ):
        pytest.skip(f"no user namespaces here: {result.output}")
    own, child = result
    assert own is None, "the interpreter of the worker ran it"
    # Programs that the function starts do run it, as confined as the function is.
    limits, read = ast.literal_eval(child)
    assert read in ("PermissionError", "FileNotFoundError")
    assert sandbox == "process" or limits == [0, 256]


@BUBBLEWRAP
@pytest.mark.parametrize("sandbox", ["bubblewrap", "process"])
async def test_source_that_has_a_module_of_the_standard_library_does_not_replace_the_workers(
    client: Client, sandbox: str
) -> None:
    shadows = {f"{name}.py": "raise SystemExit('replaced')\n" for name in SHADOWS}
    sha = await upload(client, {"scoring.py": "def score(x):\n    return x + 1\n", **shadows})
    result = await run(client, sha, sandbox=sandbox)
    if (
        isinstance(result, reward_pb.InvocationError)
        and "namespace" in result.message + result.output
    ):
        pytest.skip(f"no user namespaces here: {result.output}")
    assert result == 2


PACK = {"pack/__init__.py": "", "pack/rule.py": "def score(x):\n    return x + 5\n"}


@BUBBLEWRAP
async def test_a_container_is_fed_with_it(tmp_path: Path) -> None:
    """The first program in it, without an engine: its input, and its imports."""
    sources = SourceStore(tmp_path / "kept")
    before = os.umask(0o077)
    sha = sources.put(files(PACK))
    os.umask(before)
    assert (sources.find(sha) / "pack").stat().st_mode & 0o777 == 0o755
    assert (sources.find(sha) / "pack/rule.py").stat().st_mode & 0o777 == 0o644
    work = tmp_path / "work"
    work.mkdir()
    frames = b"".join(
        file_frame(name, path.read_bytes())
        for name, path in {
            "troupe/supervisor.py": Path(supervisor.__file__),
            "troupe/worker.py": Path(worker.__file__),
            **{f"source/{file}": sources.find(sha) / file for file in PACK},
        }.items()
    )
    programs = ("troupe/supervisor.py", "troupe/worker.py")
    frames += command_frame([sys.executable, *programs, "--core=0", "--texts=source"])
    for request in (
        {"id": 1, "call": "prepare", "entrypoint": "pack.rule:score"},
        {
            "id": 2,
            "call": "invoke",
            "entrypoint": "pack.rule:score",
            "arguments_json": '{"x": 1}',
            "memory_mib": 0,
            "environment": {},
        },
    ):
        body = json.dumps(request).encode()
        frames += struct.pack(">I", len(body)) + body
    process = await asyncio.create_subprocess_exec(
        # The first process, as in a container: it ends all others.
        *("bwrap", "--unshare-pid", "--as-pid-1", "--dev-bind", "/", "/", "--proc", "/proc"),
        *(sys.executable, "-I", "-S", "-c", BOOT),
        cwd=work,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(frames)
    async with asyncio.timeout(PATIENCE):
        for _ in range(2):
            (size,) = struct.unpack(">I", await process.stdout.readexactly(4))
            answer = json.loads(await process.stdout.readexactly(size))
            assert answer["answer"][0] == "ok", answer
        assert answer["answer"][1] == "6"
        process.stdin.close()
        await process.wait()


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ([], "no file"),
        (["/etc/passwd"], "leads out"),
        (["a/../../b.py"], "leads out"),
        (["a//b.py"], "leads out"),
        (["a.py", "a.py"], "twice"),
        (["a", "a/b.py"], "inside a file"),
        (["a" * 256], "too long"),
        (["a/" * 600 + "b.py"], "too long"),
        (["a/__pycache__/b.pyc"], "is byte code"),
        (["troupe/__init__.py"], "Troupe's own package"),
        (["a.py", "troupe.py"], "Troupe's own package"),
        (["troupe.cpython-311-x86_64-linux-gnu.so"], "Troupe's own package"),
        (["services/reward/worker.py"], "Troupe's own package"),
    ],
)
async def test_bad_paths_are_refused(tmp_path: Path, paths: list[str], says: str) -> None:
    sources = SourceStore(tmp_path / "kept")
    with pytest.raises(InvalidArgument, match=says):
        sources.put([reward_pb.SourceFile(path=path) for path in paths])
    assert not (tmp_path / "kept").exists()


async def test_a_hash_is_of_paths_and_contents_in_any_order(tmp_path: Path) -> None:
    sources = SourceStore(tmp_path / "kept")
    one, two = files({"a.py": "x = 1", "b.py": "y = 2"})
    assert sources.put([one, two]) == sources.put([two, one]) == digest([one, two])
    assert digest([one]) != digest(files({"a.py": "x = 2"})) != digest(files({"c.py": "x = 2"}))
    assert sources.files(digest([one, two])) == [one, two]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [digest([one, two])]
