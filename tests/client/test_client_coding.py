"""The ready coding tools in the sandbox that they are made for: one for each trajectory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.conftest import QUICK
from tests.client.test_client_functions import Town, town
from tests.support.needs import BUBBLEWRAP
from troupe.client import Client, InvocationFailed

__all__ = ["town"]
pytestmark = [
    pytest.mark.slow,
    BUBBLEWRAP,
]
TEST = "from add import add\n\ndef test_add(): assert add(2, 2) == 4\n"


@pytest.fixture(scope="module")
def client(town: Town) -> Iterator[Client]:
    with Client(town.address, settings=QUICK) as client:
        client.functions.deploy("troupe.functions.library.code")
        yield client


def test_files_stay_between_the_calls_of_a_trajectory(client: Client) -> None:
    def call(name: str, trajectory: str = "one", **arguments: object) -> dict[str, object]:
        found: dict[str, object] = client.functions.invoke(
            name, arguments, trajectory_id=trajectory
        )
        return found

    call("write_files", files={"add.py": "def add(a, b): return a - b\n"})
    wrong = call("run_pytest", files={"test_add.py": TEST})
    assert (wrong["passed"], wrong["failed"], wrong["exit_code"]) == (0, 1, 1), wrong
    call("write_files", files={"add.py": "def add(a, b): return a + b\n"})
    right = call("run_pytest", paths=["test_add.py"])
    assert (right["passed"], right["exit_code"]) == (1, 0), right
    assert call("run_python", "other", code="import os; print(os.listdir())")["stdout"] == "[]\n"


def test_code_that_a_model_runs_cannot_reach_the_host(client: Client) -> None:
    probe = (
        "import os, socket\n"
        "print(os.getuid(), 'TROUPE_REDIS_URL' in os.environ, os.path.exists('/etc/shadow'))\n"
        "socket.create_connection(('127.0.0.1', 1), 1)\n"
    )
    ran = client.functions.invoke("run_python", {"code": probe}, trajectory_id="probe")
    user, *found = ran["stdout"].split()
    assert user != "0"
    assert found == ["False", "False"]
    assert ran["exit_code"] == 1
    with pytest.raises(InvocationFailed, match="leads out of the working directory"):
        client.functions.invoke("read_file", {"path": "/etc/passwd"}, trajectory_id="probe")
