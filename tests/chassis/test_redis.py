"""The services' Redis client: refusals by Redis, and the remedies that errors name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from services.chassis.redis import RedisClient, RedisWatch
from services.chassis.telemetry import Telemetry
from services.orchestrator.state.redis import RedisAccess
from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE, block_until, until
from troupe.cluster.redis import ping, require_redis
from troupe.rpc import (
    NO_RETRY,
    FailedPrecondition,
    ResourceExhausted,
    RetryPolicy,
    TroupeError,
    Unavailable,
)

SCRIPTS = {"write": "return redis.call('SET', KEYS[1], ARGV[1])"}


def client_of(url: str, *, timeout: float = 5.0) -> RedisClient:
    return RedisClient(
        url, SCRIPTS, name="test", retries=NO_RETRY, timeout=timeout, patience=timeout
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()  # one that cannot save does not stop in order


async def first_script(client: RedisClient) -> None:
    await client.wait_ready()
    await client.run_script("write", ["key"], ["1"])


async def errors_of(client: RedisClient) -> list[TroupeError]:
    """Return the errors of a plain write, a script, and a script among other commands."""
    raised: list[TroupeError] = []
    for write in (
        lambda: client.call("SET", "key", "1"),
        lambda: client.run_script("write", ["key"], ["1"]),
        lambda: client.call_each([("GET", "key"), client.script_command("write", ["key"], ["1"])]),
    ):
        with pytest.raises(TroupeError) as caught:
            await write()
        raised.append(caught.value)
    return raised


def as_full(plain: redis.Redis) -> None:
    plain.config_set("maxmemory", 1)


def as_replica(plain: redis.Redis) -> None:
    plain.replicaof("127.0.0.1", "1")  # type: ignore[no-untyped-call]


def without_replicas(plain: redis.Redis) -> None:
    plain.config_set("min-replicas-to-write", 1)


def with_a_snapshot_that_fails(plain: redis.Redis) -> None:
    directory = Path(str(plain.config_get("dir")["dir"]))
    (directory / "taken" / "by").mkdir(parents=True)
    plain.config_set("dbfilename", "taken")
    plain.bgsave()
    block_until(lambda: plain.info("persistence")["rdb_last_bgsave_status"] == "err")
    plain.config_set("save", "3600 1")


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (as_full, ResourceExhausted, ("is full: it uses", "Raise maxmemory")),
        (as_replica, Unavailable, ("replica", "REPLICAOF NO ONE")),
        (without_replicas, Unavailable, ("too few replicas", "min-replicas-to-write")),
        (with_a_snapshot_that_fails, Unavailable, ("disk", "stop-writes-on-bgsave-error")),
    ],
)
async def test_a_redis_that_takes_no_writes_says_why_and_what_mends_it(
    server: RedisServer,
    spoil: Callable[[redis.Redis], None],
    kind: type[TroupeError],
    words: tuple[str, ...],
) -> None:
    client = client_of(server.url)
    await client.wait_ready()
    with server.client() as plain:
        await asyncio.to_thread(spoil, plain)
        for error in await errors_of(client):
            assert isinstance(error, kind), error
            assert all(word in str(error) for word in words), error
        with pytest.raises(kind):
            await client.ping()
    await client.close()


async def test_a_redis_that_runs_an_endless_script_names_its_end(server: RedisServer) -> None:
    client = client_of(server.url)
    await client.wait_ready()
    with server.client() as plain, server.client() as other:
        plain.config_set("lua-time-limit", 1)

        def loop() -> None:
            with pytest.raises(redis.ResponseError):
                other.eval("while true do end", 0)

        endless = threading.Thread(target=loop)
        endless.start()
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    await client.ping()
                except Unavailable as error:
                    assert "SCRIPT KILL" in str(error)  # noqa: PT017 - it begins sometime
                    break
        plain.script_kill()
        endless.join()
    await client.ping()
    await client.close()


async def test_a_redis_that_loads_its_data_is_waited_for() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            writer.write(b"-LOADING Redis is loading the dataset in memory\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as loading:
        port = loading.sockets[0].getsockname()[1]
        client = client_of(f"redis://127.0.0.1:{port}/0")
        starting = asyncio.create_task(client.wait_ready())
        await until(lambda: "reading its data" in (client.problem or ""))
        assert not starting.done()
        starting.cancel()
        await client.close()


def with_user(plain: redis.Redis, *commands: str) -> None:
    plain.acl_setuser(
        "u", enabled=True, passwords=["+secret"], commands=["+@all", *commands], keys=["*"]
    )


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        (("-evalsha",), ("evalsha", "ACL SETUSER")),
        (("-info",), ("info", "ACL SETUSER")),
        (("-script",), ("script", "ACL SETUSER")),
        (("-set",), ("set", "ACL SETUSER")),
        (("-@dangerous",), ("command", "ACL SETUSER")),
    ],
)
async def test_a_user_who_lacks_a_command_is_told_which(
    server: RedisServer, commands: tuple[str, ...], words: tuple[str, ...]
) -> None:
    with server.client() as plain:
        with_user(plain, *commands)
    client = client_of(server.url.replace("//", "//u:secret@"))
    with pytest.raises(FailedPrecondition) as caught:
        await first_script(client)
    assert caught.value.kind == "redis_refuses"
    assert all(word in str(caught.value) for word in words)
    assert "secret" not in str(caught.value)
    await client.close()


async def test_an_evicting_policy_is_noticed_where_config_is_forbidden(
    server: RedisServer,
) -> None:
    with server.client() as plain:
        plain.config_set("maxmemory", "1gb")
        plain.config_set("maxmemory-policy", "allkeys-lru")
        with_user(plain, "-config")
    client = client_of(server.url.replace("//", "//u:secret@"))
    with pytest.raises(FailedPrecondition) as caught:
        await client.wait_ready()
    assert caught.value.kind == "redis_evicts"
    assert (caught.value.field, caught.value.value) == ("maxmemory-policy", "allkeys-lru")
    await client.close()


@pytest.mark.parametrize(
    ("extra", "path", "kind", "words"),
    [
        (("--cluster-enabled", "yes"), "/0", "redis_url", ("redis-cluster://",)),
        ((), "/99", "redis_refuses", ("databases",)),
        (("--rename-command", "EVALSHA", ""), "/0", "redis_refuses", ("renamed",)),
        (("--rename-command", "INFO", "HIDDEN"), "/0", "redis_refuses", ("renamed",)),
    ],
)
async def test_a_redis_that_is_set_up_otherwise_is_refused(
    tmp_path: Path, extra: tuple[str, ...], path: str, kind: str, words: tuple[str, ...]
) -> None:
    server = RedisServer(tmp_path, extra=extra)
    server.start()
    client = client_of(server.url.removesuffix("/0") + path)
    with pytest.raises(FailedPrecondition) as caught:
        await first_script(client)
    assert caught.value.kind == kind
    assert all(word in str(caught.value) for word in words)
    await client.close()
    server.stop()


async def test_a_user_who_may_not_write_the_keys_is_refused_at_start(server: RedisServer) -> None:
    with server.client() as plain:
        plain.acl_setuser(
            "u", enabled=True, passwords=["+secret"], categories=["+@all"], keys=["other:*"]
        )
    client = client_of(server.url.replace("//", "//u:secret@"))
    with pytest.raises(FailedPrecondition) as caught:
        await client.wait_ready()
    assert caught.value.kind == "redis_refuses"
    assert "~*" in str(caught.value)
    await client.close()


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ("", ("user and password",)),
        (":wrong@", ("user and password",)),
        ("nobody:wrong@", ("user and password",)),
        ("u:right@", ("ACL SETUSER",)),
    ],
)
async def test_a_cluster_and_its_services_are_told_alike_why_redis_refuses_them(
    server: RedisServer, user: str, words: tuple[str, ...]
) -> None:
    with server.client() as plain:
        plain.acl_setuser("u", enabled=True, passwords=["+right"], commands=["+ping", "+hello"])
        plain.config_set("requirepass", "right")
    url = server.url.replace("//", f"//{user}")
    client = client_of(url)
    for refused in (client.wait_ready(), require_redis(url, timeout=PATIENCE)):
        with pytest.raises(FailedPrecondition) as caught:
            await refused
        assert caught.value.kind == "redis_refuses"
        assert all(word in str(caught.value) for word in words)
        assert "wrong" not in str(caught.value).replace("WRONGPASS", "")
    await client.close()


BAD_URLS = {
    "": "schemes",
    "127.0.0.1:6379": "schemes",
    "http://127.0.0.1:6379": "schemes",
    "redis://127.0.0.1:99999/0": "port",
    "redis://::1:6379/0": "brackets",
    "redis://[::1:6379/0": "IPv6",
    "redis://:pass#word@127.0.0.1:6379/0": "Percent-encode",
    "redis://:pa/ss@127.0.0.1:6379/0": "Percent-encode",
    "redis://127.0.0.1:6379/x": "database",
    "redis://127.0.0.1:6379/0/1": "database",
    "redis://127.0.0.1:6379/0?sockettimeout=1": "sockettimeout",
    "redis://127.0.0.1:6379/0?socket_timeout=x": "socket_timeout",
}


@pytest.mark.parametrize("url", BAD_URLS)
async def test_an_invalid_redis_url_is_refused_before_anything_starts(url: str) -> None:
    raised = []
    with pytest.raises(FailedPrecondition) as caught:
        client_of(url)
    raised.append(caught.value)
    with pytest.raises(FailedPrecondition) as caught:
        await require_redis(url)
    raised.append(caught.value)
    for error in raised:
        assert (error.kind, error.field) == ("redis_url", "redis_url")
        assert BAD_URLS[url] in str(error)
        assert "ss@" not in str(error)
        assert "pass" not in str(error).lower().replace("password", "")


@pytest.mark.parametrize(
    "url", ["redis-cluster://a:1", "redis-cluster://a:1,b", "redis-cluster://:x"]
)
async def test_a_redis_cluster_is_for_samples_only(url: str) -> None:
    with pytest.raises(FailedPrecondition, match="only TROUPE_STORE_REDIS_URL") as caught:
        await require_redis(url)
    assert caught.value.kind == "redis_url"
    with pytest.raises(FailedPrecondition, match="only TROUPE_STORE_REDIS_URL"):
        RedisAccess(url)


async def test_a_cluster_is_not_started_on_a_redis_that_may_evict(server: RedisServer) -> None:
    await require_redis(server.url, timeout=PATIENCE)
    assert await ping(server.url, 30) is None
    with server.client() as plain:
        plain.config_set("maxmemory", "1gb")
        plain.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(FailedPrecondition) as caught:
        await require_redis(server.url, timeout=PATIENCE)
    assert caught.value.kind == "redis_evicts"
    assert "maxmemory-policy = allkeys-lru" in str(await ping(server.url, 30))


async def test_a_watch_notices_a_policy_that_changes_and_that_it_is_mended(
    server: RedisServer,
) -> None:
    client = client_of(server.url)
    await client.wait_ready()
    telemetry = Telemetry()
    watch = RedisWatch(client, telemetry)

    def gauge() -> float | None:
        return telemetry.registry.get_sample_value("troupe_redis_unfit")

    with server.client() as plain:
        plain.config_set("maxmemory", "1gb")
        assert not await watch.look()
        assert (watch.trouble, gauge()) == (None, 0)
        plain.config_set("maxmemory-policy", "volatile-ttl")
        assert await watch.look()
        assert watch.trouble is not None
        assert watch.trouble.kind == "redis_evicts"
        assert gauge() == 1
        assert not await watch.look()
        plain.config_set("maxmemory-policy", "noeviction")
        assert await watch.look()
        assert (watch.trouble, gauge()) == (None, 0)
        plain.config_set("maxmemory", 1)
        assert await watch.look()
        assert isinstance(watch.trouble, ResourceExhausted)
    await client.close()


async def test_a_client_that_waits_for_room_goes_on_when_there_is_some(
    server: RedisServer,
) -> None:
    class Patient(RedisClient):
        waits_for = (Unavailable, ResourceExhausted)

    client = Patient(
        server.url,
        SCRIPTS,
        name="test",
        retries=RetryPolicy(max_attempts=None, initial_backoff=0.01, max_backoff=0.05),
        timeout=5,
        patience=60,
    )
    await client.wait_ready()
    with server.client() as plain:
        plain.config_set("maxmemory", 1)
        writing = asyncio.create_task(client.run_script("write", ["key"], ["1"]))
        await asyncio.sleep(0.2)  # there is no room, however long this takes
        assert not writing.done()
        plain.config_set("maxmemory", 0)
        await asyncio.wait_for(writing, PATIENCE)
        assert plain.get("key") == b"1"
    await client.close()


# Many callers at once share the connections.


async def echo(client: RedisClient, number: int) -> None:
    size = 100_000 if number % 7 == 0 else 1
    texts = [f"{number}-{part}".encode() * size for part in range(1 + number % 3)]
    assert await client.call_each([("ECHO", text) for text in texts]) == texts


async def test_every_caller_gets_its_own_replies_though_others_are_cancelled(
    server: RedisServer,
) -> None:
    client = client_of(server.url, timeout=PATIENCE)
    try:
        calls = [asyncio.create_task(echo(client, number)) for number in range(200)]
        for turn in range(50):
            await asyncio.sleep(0)
            calls[turn * 3].cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        cancelled = [number for number, result in enumerate(results) if result is not None]
        assert all(isinstance(results[number], asyncio.CancelledError) for number in cancelled)
        assert cancelled
        assert set(cancelled) <= set(range(0, 150, 3))
        await echo(client, 1)
    finally:
        await client.close()


async def test_an_error_reply_belongs_to_one_command_of_a_pipeline(server: RedisServer) -> None:
    client = client_of(server.url)
    try:
        await client.call("RPUSH", "list", "1")
        commands = [("ECHO", "a"), ("GET", "list"), ("ECHO", "b")]
        first, error, last = await client.call_each(commands, keep_mistyped=True)
        assert (first, last) == (b"a", b"b")
        assert isinstance(error, Exception)
        with pytest.raises(TroupeError, match="WRONGTYPE"):
            await client.call_each(commands)
    finally:
        await client.close()


async def test_all_callers_learn_that_redis_died_and_the_client_reconnects(
    server: RedisServer,
) -> None:
    client = client_of(server.url, timeout=PATIENCE)
    try:
        await echo(client, 1)
        server.pause()
        calls = [asyncio.create_task(echo(client, number)) for number in range(20)]
        await asyncio.sleep(0.1)
        server.kill()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, Unavailable) for result in results)
        server.start()
        await asyncio.gather(*(echo(client, number) for number in range(20)))
    finally:
        await client.close()


async def test_a_call_without_an_answer_times_out_and_its_late_reply_reaches_nobody(
    server: RedisServer,
) -> None:
    client = client_of(server.url, timeout=0.3)
    try:
        await echo(client, 1)
        server.pause()
        with pytest.raises(Unavailable):
            await client.call("ECHO", "lost")
        server.resume()

        async def answered() -> bool:
            try:
                return bool(await client.call("ECHO", "found") == b"found")
            except Unavailable:  # a busy machine: 0.3 s are short
                return False

        await until(answered)
    finally:
        await client.close()
