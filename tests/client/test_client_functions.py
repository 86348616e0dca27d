"""Functions as users have them: the SDK and the CLI, through a real orchestrator, run by a real
reward service."""

from __future__ import annotations

import asyncio
import json
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.client.conftest import QUICK, Run
from tests.rollout.processes import ServiceProcess
from tests.support.cluster import job_yaml
from tests.support.waiting import PATIENCE, block_until, until
from troupe.client import (
    Client,
    Function,
    Invocation,
    InvocationFailed,
    InvocationProgress,
)
from troupe.outcomes import type_name
from troupe.rpc import AlreadyExists, InvalidArgument, NotFound, connect
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1.reward_pb2_grpc import RewardStub

SOURCE = '''
"""Functions that a user deploys from a file."""
import sys
import time
from pathlib import Path

import troupe

assert Path(__file__).name == "scores.py"


@troupe.reward(cores=0, timeout_seconds=7)
def exact(answer: str, expected: str = "4") -> float:
    """One for the right answer."""
    print("asked about", answer, file=sys.stderr, flush=True)
    return float(answer == expected)


@troupe.tool(version="3", cores=0)
def fails(how: str) -> str:
    raise ValueError(how)


@troupe.tool(cores=0)
def sleeps(seconds: float) -> None:
    time.sleep(seconds)
'''


@dataclass
class Town:
    """An orchestrator and a reward service, each a process."""

    orchestrator: ServiceProcess
    reward: ServiceProcess

    @property
    def address(self) -> str:
        return self.orchestrator.address


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Town]:
    home = tmp_path_factory.mktemp("town")
    reward = ServiceProcess("reward", home)
    reward.start()
    told = {
        "TROUPE_REWARD_ADDRESS": reward.address,
        "TROUPE_REDIS_URL": redis_url,
        "TROUPE_DATA_DIR": str(home / "data"),
    }
    orchestrator = ServiceProcess("orchestrator", home, told)
    orchestrator.start()
    yield Town(orchestrator, reward)
    orchestrator.stop()
    reward.stop()


@pytest.fixture
def client(town: Town) -> Iterator[Client]:
    with Client(town.address, settings=QUICK) as client:
        yield client


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "scores.py"
    path.write_text(textwrap.dedent(SOURCE))
    return path


@pytest.fixture
def deployed(client: Client, source: Path) -> list[Function]:
    return client.functions.deploy(source)


def test_a_file_is_deployed_with_what_it_declares(deployed: list[Function]) -> None:
    exact, fails, _ = deployed
    assert (exact.name, exact.version, exact.kind) == ("exact", "1", "reward")
    assert (fails.name, fails.version, fails.kind) == ("fails", "3", "tool")
    assert exact.costs["timeout_seconds"] == 7
    assert exact.parameters["required"] == ["answer"]
    assert exact.description == "One for the right answer."
    assert len(exact.source_sha256) == 64 == len(fails.source_sha256)


def test_a_call_has_its_value_or_its_error(client: Client, deployed: list[Function]) -> None:
    assert client.functions.invoke("exact", {"answer": "4"}) == 1.0
    with pytest.raises(InvocationFailed, match="ValueError: no") as failed:
        client.functions.invoke("fails", {"how": "no"})
    assert failed.value.kind == "raised"
    assert "raise ValueError(how)" in failed.value.traceback
    with pytest.raises(NotFound, match="name = nobody"):
        client.functions.invoke("nobody")
    with pytest.raises(InvalidArgument, match="not JSON"):
        client.functions.invoke("exact", {"answer": b"4"})


def test_a_batch_says_of_each_call_how_it_ended(client: Client, deployed: list[Function]) -> None:
    ended = client.functions.invoke_batch("exact", [{"answer": "4"}, {"answer": "5"}, {"x": 1}])
    assert [one.value for one in ended] == [1.0, 0.0, None]
    assert ended[2].error is not None
    assert ended[2].error.kind == "raised"


def test_a_stream_tells_what_happens_and_last_how_it_ended(
    client: Client, deployed: list[Function]
) -> None:
    *before, last = client.functions.invoke_stream("exact", {"answer": "4"})
    assert isinstance(last, Invocation)
    assert last.value == 1.0
    states = [one.state for one in before if isinstance(one, InvocationProgress)]
    assert {"started", "output"} <= set(states)
    printed = "".join(one.output for one in before if isinstance(one, InvocationProgress))
    assert "asked about 4" in printed


def test_a_call_can_be_cancelled_by_its_id(client: Client, deployed: list[Function]) -> None:
    failed: list[InvocationFailed] = []

    def call() -> None:
        try:
            client.functions.invoke("sleeps", {"seconds": 60.0}, invocation_id="long")
        except InvocationFailed as error:
            failed.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    block_until(lambda: client.functions.cancel("long"))
    caller.join(PATIENCE)
    assert failed[0].kind == "cancelled"


def test_a_version_stands_for_one_function_for_good(client: Client, source: Path) -> None:
    client.functions.deploy(source)
    client.functions.deploy(source)
    source.write_text(source.read_text() + "\n\ndef more() -> None: ...\n")
    with pytest.raises(AlreadyExists, match="deployed with other code or costs"):
        client.functions.deploy(source)
    (again,) = client.functions.deploy(f"{source}:exact", version="2", cores=1)
    assert (again.version, again.costs["cores"]) == ("2", 1)
    assert client.functions.get("exact").version == "2"
    assert client.functions.delete("exact", "2")
    assert not client.functions.delete("exact", "2")
    assert client.functions.get("exact").version == "1"


def test_deployed_functions_survive_a_restart_of_the_reward_service(
    town: Town, client: Client, deployed: list[Function]
) -> None:
    town.reward.kill()
    town.reward.start()
    with Client(town.address) as patient:
        assert patient.functions.invoke("exact", {"answer": "4"}) == 1.0


async def test_a_service_that_restarted_is_told_without_being_asked(
    town: Town, deployed: list[Function]
) -> None:
    """Jobs' calls go from rollout to the reward service, not through the orchestrator."""
    channel = connect(town.reward.address, QUICK)
    stub = RewardStub(channel)
    await stub.DeleteFunction(
        reward_pb.DeleteFunctionRequest(request_id="x", name="exact", version="1")
    )

    async def told() -> bool:
        listed = await stub.ListFunctions(reward_pb.ListFunctionsRequest())
        return any(one.function.name == "exact" for one in listed.functions)

    await until(told)
    await channel.close()


def test_a_function_that_runs_nowhere_any_more_keeps_no_other_from_running(
    town: Town, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_REWARD_QUOTAS", '{"api": {"rate": 9}}')
    town.reward.kill()
    town.reward.start()
    with Client(town.address) as client:
        client.functions.deploy(f"{source}:exact", name="asks", quota="api")
        client.functions.deploy(f"{source}:exact", name="asks_nobody")
        monkeypatch.delenv("TROUPE_REWARD_QUOTAS")
        town.reward.kill()
        town.reward.start()
        assert client.functions.get("asks_nobody").version == "1"  # it answers again
        *_, ended = client.functions.invoke_stream("asks_nobody", {"answer": "4"})
        assert isinstance(ended, Invocation)
        assert ended.value == 1.0
        # It exists nevertheless, with its fault.
        assert client.functions.get("asks").costs["quota"] == "api"
        with pytest.raises(InvalidArgument, match="no quotas are declared here"):
            client.functions.invoke("asks", {"answer": "4"})
        assert [client.functions.delete(name, "1") for name in ("asks", "asks_nobody")] == [
            True
        ] * 2


def test_logs_are_what_calls_printed(client: Client, deployed: list[Function]) -> None:
    client.functions.invoke("exact", {"answer": "seven"}, invocation_id="logged")
    lines = list(client.functions.logs("exact", invocation_id="logged"))
    assert [line.text.strip() for line in lines] == ["asked about seven"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_module\n", "No module named"),
        ("x = 1\n", "does not declare a function"),
        ("def f(: pass\n", "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_deployed_is_refused_before_it_is_sent(
    client: Client, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(InvalidArgument, match=said):
        client.functions.deploy(tmp_path / "bad.py")


def test_costs_that_cannot_work_are_refused(client: Client, source: Path) -> None:
    with pytest.raises(InvalidArgument, match="cores"):
        client.functions.deploy(f"{source}:exact", version="9", cores=-1)
    with pytest.raises(InvalidArgument, match="corse"):
        client.functions.deploy(f"{source}:exact", version="9", corse=1)
    with pytest.raises(InvalidArgument, match="the source declares 3 functions"):
        client.functions.deploy(source, name="one")
    with pytest.raises(InvalidArgument, match="is not a file"):
        client.functions.deploy("nowhere.py")
    other = source.with_suffix(".txt")
    other.write_text("")
    with pytest.raises(InvalidArgument, match="is a file, but not Python source"):
        client.functions.deploy(str(other))


def test_a_folder_is_deployed_by_a_module_in_it(client: Client, tmp_path: Path) -> None:
    package = tmp_path / "code" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "words.txt").write_text("four")
    (package / "blob.bin").write_bytes(b"\xff\xfe")
    (package / "score.py").write_text(
        "from pathlib import Path\n"
        "WORD = Path(__file__).with_name('words.txt').read_text()\n"
        "def score(answer):\n    return float(answer == WORD)\n"
    )
    (tmp_path / "code" / ".secret").write_text("key")
    (one,) = client.functions.deploy(tmp_path / "code", entrypoint="mine.score:score")
    assert (one.name, one.kind) == ("score", "")
    assert client.functions.invoke("score", {"answer": "four"}) == 1.0
    with pytest.raises(InvalidArgument, match="is a folder"):
        client.functions.deploy(tmp_path / "code")


def test_a_job_that_names_no_deployed_function_is_refused(client: Client) -> None:
    job = job_yaml(rewards={"exact": {"function": "nobody@1"}})
    with pytest.raises(InvalidArgument, match=r"rewards\.exact\.function = nobody@1"):
        client.submit(job)


def test_the_command_line_does_the_same(
    town: Town, run: Run, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_ORCHESTRATOR_ADDRESS", town.address)
    status, out, err = run("functions", "deploy", str(source))
    assert (status, err) == (0, "")
    assert "deployed reward exact@1 (source " in out
    status, out, err = run("functions", "invoke", "exact", "--arguments", '{"answer": "4"}')
    assert (status, out) == (0, "1.0\n")
    assert "asked about 4" in err
    status, out, err = run("functions", "invoke", "fails@3", "--arguments", '{"how": "so"}')
    assert status == 1
    assert err.splitlines()[-1] == "error: fails: ValueError: so"
    status, out, _ = run("functions", "list")
    assert "exact@1" in out
    status, out, _ = run("functions", "show", "exact@1", "--json")
    assert json.loads(out)["costs"]["timeout_seconds"] == 7
    status, out, _ = run("functions", "logs", "exact", "--lines", "1")
    assert "asked about 4" in out
    assert run("functions", "delete", "sleeps@1")[0] == 0
    assert run("functions", "delete", "sleeps@1")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("deploy", "nowhere.py"), "source = nowhere.py: is not a file"),
        (("deploy", "x.py", "--set", "cores"), "--set = cores: is not an assignment"),
        (("deploy", "x.py", "--set", "cores={"), "--set = cores={: line 2, column 1: did not find"),
        (("deploy", "x.py", "--set", "name=y"), "name = y: is not a cost of a function"),
        (("deploy", "x.py", "--set", f"cores={1 << 70}"), f"cores = {1 << 70}: Input should be"),
        (("invoke", "exact", "--arguments", "{"), "--arguments = {: is not JSON"),
        (("invoke", "nobody"), "name = nobody: no function of this name is deployed"),
        (("delete", "exact"), "NAME@VERSION = exact: names no version"),
    ],
)
def test_wrong_input_is_one_line(
    town: Town, run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.setenv("TROUPE_ORCHESTRATOR_ADDRESS", town.address)
    status, _, err = run("functions", *arguments)
    assert status == 2
    assert err.startswith(f"error: {said}")
    assert err.count("\n") == 1


ODD = """
import sys

import troupe


class Hostile:
    def tolist(self):
        sys.exit(3)

    def __repr__(self):
        raise KeyboardInterrupt


VALUES = {
    "nan": float("nan"),
    "infinite": [float("inf")],
    "huge": 10**5000,
    "hostile": Hostile(),
    "set": {1},
    "key": {(1, 2): 3},
    "half": ["\\ud800", {"\\udfff": 1}],
    "large": 10**400,
}
for name, depth in {"deep": 300, "deeper": 900, "deepest": 100_000}.items():
    VALUES[name] = []
    for _ in range(depth):
        VALUES[name] = [VALUES[name]]


@troupe.tool(cores=0)
def odd(name: str) -> object:
    return VALUES[name]


@troupe.tool(cores=0)
def ends(how: str) -> None:
    raise {
        "group": BaseExceptionGroup("g", [SystemExit(1), KeyboardInterrupt()]),
        "exit": SystemExit(0),
        "half": ValueError("\\ud800"),
        "closed": GeneratorExit(),
    }[how]
"""


@pytest.fixture
def odd(client: Client, tmp_path: Path) -> list[Function]:
    path = tmp_path / "odd.py"
    path.write_text(ODD)
    return client.functions.deploy(path)


@pytest.mark.parametrize(
    "name",
    ["nan", "infinite", "huge", "hostile", "set", "key", "deep", "deeper", "deepest"],
)
def test_an_answer_that_is_not_json_is_a_typed_error(
    client: Client, odd: list[Function], name: str
) -> None:
    with pytest.raises(InvocationFailed) as failed:
        client.functions.invoke("odd", {"name": name})
    assert failed.value.kind == "bad_result", failed.value
    (ended,) = client.functions.invoke_batch("odd", [{"name": name}])
    assert ended.error is not None
    assert ended.error.kind == "bad_result"


def test_answers_are_text_that_can_be_written(client: Client, odd: list[Function]) -> None:
    assert client.functions.invoke("odd", {"name": "half"}) == ["\ufffd", {"\ufffd": 1}]
    assert client.functions.invoke("odd", {"name": "large"}) == 10**400


@pytest.mark.parametrize("how", ["group", "exit", "half", "closed"])
def test_whatever_a_function_raises_is_its_error(
    client: Client, odd: list[Function], how: str
) -> None:
    with pytest.raises(InvocationFailed) as failed:
        client.functions.invoke("ends", {"how": how})
    assert failed.value.kind == "raised"
    str(failed.value).encode()


@pytest.mark.parametrize("value", [float("nan"), 10**5000, {1}, {(1, 2): 3}], ids=type_name)
def test_arguments_that_are_not_json_are_refused(
    client: Client, odd: list[Function], value: object
) -> None:
    with pytest.raises(InvalidArgument, match="not JSON") as refused:
        client.functions.invoke("odd", {"name": value})
    assert refused.value.field == "arguments"


@pytest.mark.parametrize("text", ["", "{", "NaN", "[1e400]", "[" * 900 + "]" * 900, "1" * 5000])
def test_malformed_answers_of_a_sandbox_become_typed_errors(text: str) -> None:
    ended = Invocation.of_call("name", "id", reward_pb.InvokeResponse(result_json=text))
    assert ended.value is None
    assert ended.error is not None
    assert ended.error.kind == "bad_result"


def test_an_invalid_schema_is_refused_when_it_is_registered(town: Town) -> None:
    async def register() -> None:
        async with connect(town.reward.address) as channel:
            spec = reward_pb.FunctionSpec(
                name="odd-schema",
                version="1",
                entrypoint="tests.rollout.plays:add",
                timeout_seconds=1,
                parameters_json="{",
            )
            await RewardStub(channel).RegisterFunction(
                reward_pb.RegisterFunctionRequest(request_id="odd-schema", function=spec)
            )

    with pytest.raises(InvalidArgument) as refused:
        asyncio.run(register())
    assert refused.value.field == "function.parameters_json"


def test_the_cli_prints_no_traceback_for_odd_answers(
    odd: list[Function], town: Town, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_ORCHESTRATOR_ADDRESS", town.address)
    for name in ("nan", "deep", "deepest", "hostile"):
        arguments = json.dumps({"name": name})
        status, _, err = run("functions", "invoke", "odd", "--arguments", arguments)
        assert status == 1, err
        # gRPC's pollers of several event loops in one process speak before.
        assert err.splitlines()[-1].startswith("error: odd: "), err
    status, _, err = run("functions", "invoke", "odd", "--arguments", "[" * 100_000)
    assert status == 2
    assert err.splitlines()[-1].startswith("error: --arguments"), err
