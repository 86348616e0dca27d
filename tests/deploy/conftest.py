"""The wheel; a container engine and the images of all services, for tests that start them.

A container engine: one that runs already (`docker info`), or a tool named by
TROUPE_DOCKER_ENGINE_TOOL with the verbs `up DIR`, `base DIR` and `down DIR`, which starts one.
Official images that cannot be pulled are stood in for under the same tag. With
TROUPE_DOCKER_IMAGES=present the services' images are taken as they are, and not built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = os.environ.get("TROUPE_DOCKER_ENGINE_TOOL")
REDIS = "redis:7-alpine"
# Pip installs torch three times; another process may have the machine's cores.
BUILD_SECONDS = 1700.0

# run(*command, check=True, timeout=900, stdin="", **variables) -> what it printed.
Run = Callable[..., str]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel that `make wheel` builds from the current files that git does not ignore."""
    place = tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, place / name)
    command = ["make", "wheel", f"PYTHON={sys.executable}"]
    subprocess.run(command, cwd=place, check=True, timeout=600)
    [built] = place.glob("dist/*.whl")
    return built


def _run(
    *command: str, env: dict[str, str], timeout: float = 900, check: bool = True, stdin: str = ""
) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-4000:]}"
    return done.stdout


def _compose_program() -> list[str]:
    return ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a command in the environment in which docker and docker-compose work."""
    env = dict(os.environ)

    def run(
        *command: str,
        check: bool = True,
        timeout: float = 900,
        stdin: str = "",
        **variables: str,
    ) -> str:
        return _run(*command, env=env | variables, check=check, timeout=timeout, stdin=stdin)

    run.environment = env  # type: ignore[attr-defined]
    if (
        shutil.which("docker")
        and not subprocess.run(["docker", "info"], capture_output=True).returncode
    ):
        yield run
        return
    if TOOL is None:
        pytest.skip("no container engine runs and TROUPE_DOCKER_ENGINE_TOOL names none")
    # Kept between runs where the caller names a place: a base image takes minutes to make.
    place = os.environ.get("TROUPE_DOCKER_ENGINE_DIR") or str(tmp_path_factory.mktemp("engine"))
    for line in run(TOOL, "up", place).splitlines():
        if line.startswith("export "):
            env.update(part.split("=", 1) for part in line.removeprefix("export ").split())
    try:
        run(TOOL, "base", place)
        yield run
    finally:
        run(TOOL, "down", place, check=False)


@pytest.fixture(scope="session")
def images(engine: Run) -> Run:
    """The same, once there is an image of every service (troupe-SERVICE) and of Redis."""
    if not engine("docker", "image", "ls", "-q", REDIS).strip():
        engine("docker", "pull", "-q", REDIS, check=False)
    if not engine("docker", "image", "ls", "-q", REDIS).strip():
        stand_in = (
            "FROM python:3.11-slim\n"
            # As in the official image: the owner of a new volume at /data.
            "RUN mkdir /data && chown 999:1000 /data\n"
            'ENTRYPOINT ["sh", "-c", '
            '"exec \\"$@\\" --bind 0.0.0.0 --protected-mode no", "--"]\n'
            'CMD ["redis-server"]\n'
        )
        engine("docker", "build", "-q", "-t", REDIS, "-", stdin=stand_in)
    if os.environ.get("TROUPE_DOCKER_IMAGES") != "present":
        engine(*_compose_program(), "build", timeout=BUILD_SECONDS)
    return engine


@pytest.fixture(scope="session")
def compose_program() -> list[str]:
    """How docker-compose is called on this machine."""
    return _compose_program()
