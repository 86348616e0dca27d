"""The environment of functions of the level `process`: an allow-list."""

from __future__ import annotations

import json
import os

import pytest

from services.reward.executor import WorkerProcess
from services.reward.sandboxes.local import LocalProvider
from services.reward.sandboxes.profile import SandboxProfile, environment_of_functions

SECRETS = {
    "TROUPE_TOKEN": "t0ken",
    "TROUPE_REDIS_URL": "redis://:passw0rd@127.0.0.1:6379/0",
    "TROUPE_TLS_KEY": "/keys/key.pem",
    "TROUPE_DATA_DIR": "/data",
    "AWS_SECRET_ACCESS_KEY": "s3cret",
    "HF_TOKEN": "s3cret",
    "WANDB_API_KEY": "s3cret",
    "OPENAI_API_KEY": "s3cret",
    "SSH_AUTH_SOCK": "/tmp/agent",
    "GITHUB_TOKEN": "s3cret",
    "https_proxy": "http://user:passw0rd@proxy:3128",
}
NEEDED = {
    "PATH": "/usr/bin",
    "HOME": "/home/somebody",
    "LC_ALL": "C.UTF-8",
    "LD_LIBRARY_PATH": "/usr/local/cuda/lib64",
    "CUDA_VISIBLE_DEVICES": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HOME": "/models",
    "SSL_CERT_FILE": "/ca.pem",
    "http_proxy": "http://proxy:3128",
    "NO_PROXY": "127.0.0.1",
    "TROUPE_REWARD_CORES": "4",
}


def test_functions_do_not_see_the_variables_of_the_service() -> None:
    found = environment_of_functions(["/a", "/b"], {**SECRETS, **NEEDED, "PYTHONPATH": "/c"})
    assert found == {**NEEDED, "PYTHONPATH": "/a:/b"}


@pytest.mark.parametrize(
    ("allowed", "found"),
    [
        ("OPENAI_API_KEY", {"OPENAI_API_KEY"}),
        (" WANDB_* , HF_TOKEN,", {"WANDB_API_KEY", "HF_TOKEN"}),
        ("https_proxy", {"https_proxy"}),
        ("", set()),
        ("NOT_THERE", set()),
    ],
)
def test_functions_see_the_variables_that_are_allowed(allowed: str, found: set[str]) -> None:
    environment = {**SECRETS, "TROUPE_REWARD_ENVIRONMENT": allowed}
    assert environment_of_functions([], environment).keys() - {"PYTHONPATH"} == found


async def test_a_worker_finds_that_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TROUPE_REWARD_ENVIRONMENT", "OPENAI_API_KEY")
    process = await WorkerProcess.start(await LocalProvider().launch("test", SandboxProfile()))
    try:
        entrypoint = "hostile_functions:where"
        process.send(
            {"call": "prepare", "entrypoint": entrypoint},
            {"call": "invoke", "entrypoint": entrypoint, "arguments_json": "", "memory_mib": 0},
        )
        await process.answer()
        found = json.loads((await process.answer()).text)["environment"]
    finally:
        await process.sandbox.stop()
    assert SECRETS.keys() & found.keys() == {"OPENAI_API_KEY"}
    assert found["PATH"] == os.environ["PATH"]
