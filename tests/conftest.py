"""Fixtures that every room uses."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from redis import Redis

from scripts.landing import OUT_OF_TIME
from tests.support.redis_server import RedisServer
from troupe.workflow import loading

# A developer's runs look for new counterexamples; CI's judge the change, the same way every time.
# How long an example takes says how busy the machine is.
settings.register_profile("troupe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("troupe"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "troupe")


def pytest_collection_finish() -> None:
    """Freeze the suite's imports, so that garbage collections do not walk them (half a second
    each)."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files as the file `TROUPE_TESTS_ORDER` lists them (`scripts/landing.py`). Without it,
    quick runs of benchmarks come last: of all, they say least of a change."""
    if order := os.environ.get("TROUPE_TESTS_ORDER"):
        places = {file: place for place, file in enumerate(Path(order).read_text().splitlines())}
        items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], -1))
    else:
        items.sort(key=lambda item: "benchmarks" in item.path.parts)
    for item in items:
        if item.get_closest_marker("slow"):
            # Browsers, engines and other frameworks warn of their own code: not errors there.
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """If a run has a deadline (as in CI), leave out tests that have not begun by then, and say
    so."""
    until = os.environ.get("TROUPE_TESTS_UNTIL")
    if until and time.time() > float(until):
        pytest.skip(f"{OUT_OF_TIME}: run it by `make test-slow`")


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Restore the number of torch's threads, which a test or its callees may change (reward models
    take all cores), for later tests: passes divide their rows by it."""
    before = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    yield
    if before is not None and (torch := sys.modules["torch"]).get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A real Redis that all tests share: keep apart by job ids, and leave it running."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def redis_url(redis_server: RedisServer) -> str:
    """Where the shared Redis is."""
    return redis_server.url


@pytest.fixture
def durable_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A durable Redis of the test's own, which it may spoil."""
    server = RedisServer(tmp_path, durable=True)
    server.start()
    yield server
    server.kill()  # one that cannot save does not stop in order


@pytest.fixture(scope="module")
def no_old_jobs(redis_server: RedisServer) -> None:
    """Clear earlier modules' data from the shared Redis: a store checks every job that it finds
    there a few times a second, and hundreds of unfinished jobs slow all later tests."""
    with Redis.from_url(redis_server.url) as redis:
        redis.flushall()


@pytest.fixture
def empty_redis(redis_server: RedisServer) -> str:
    """The address of the empty shared Redis: an orchestrator continues the jobs that it finds
    there, which another test left unfinished, and this test's workers would play them."""
    with Redis.from_url(redis_server.url) as redis:
        redis.flushall()
    return redis_server.url


@pytest.fixture(autouse=True)
def _import_path_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that load a user's file put its directory on the import path of their process, and
    sandboxes show all that is on it."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="session", autouse=True)
def _edited_tests_stay() -> Iterator[None]:
    """Keep services from importing modules of the suite again, as they do with a user's modules.

    They would talk to other modules than the tests, after an edit of any file or after a test that
    has imported a file of its own. For the whole session: fixtures of modules prepare jobs, too.
    """
    here = str(Path(__file__).parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_INSTALLED", (*loading._INSTALLED, here))
        yield
