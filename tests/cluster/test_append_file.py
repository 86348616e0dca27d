"""The embedded Redis' append-only file after power cuts and other damage."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.redis_server import RedisServer
from tests.support.stub_services import write_stub_services
from tests.support.waiting import PATIENCE
from troupe.cluster import ClusterSettings, EmbeddedCluster
from troupe.cluster.errors import RedisDataDamaged
from troupe.cluster.redis import _is_unfinished, mend_append_file, redis_executable

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = 30


def command(*words: bytes) -> bytes:
    """A command as Redis writes it into its append-only file."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


NEXT = command(b"SET", b"next", b"value\r\n\0\0*1" * 20)
TRANSACTION = command(b"MULTI") + NEXT + command(b"INCR", b"next")

UNFINISHED = {
    "zeros": bytes(5000),
    "one zero": b"\0",
    "half a command": NEXT[:-30],
    "half a command and zeros": NEXT[:60] + bytes(4096),
    "a first byte and zeros": b"*" + bytes(4096),
    "half a length": b"*3\r\n$3\r\nSET\r\n$1",
    "half a line's end and zeros": b"*3\r\n$3\r" + bytes(100),
    "a transaction that does not end": TRANSACTION,
    "half a transaction": TRANSACTION[:-5],
    "half a transaction and zeros": TRANSACTION[:-5] + bytes(4096),
}
DAMAGED = {
    "garbage": b"\x93\x01garbage",
    "zeros before garbage": bytes(100) + b"garbage",
    "a whole command after zeros": bytes(100) + NEXT,
    "a wrong length": b"*1\r\n$2\r\nGET\r\n" + NEXT,
    "a missing line end": NEXT[:-2] + NEXT,
}


class Data:
    """A data directory in which a Redis was killed, and a Redis over it."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.home = data_dir / "redis"
        self.home.mkdir(parents=True)
        self.path = self.home / "appendonly.aof"
        self.server = RedisServer(self.home, durable=True)

    def mend(self, *, expected: bool = True) -> str:
        return mend_append_file(self.data_dir, redis_executable(), expected=expected)

    def fill(self, *, snapshot: bool) -> None:
        """Write, and die of a SIGKILL. `snapshot`: the file begins with one."""
        self.server.start()
        with self.server.client() as client:
            for number in range(WRITTEN):
                if snapshot and number == WRITTEN // 2:
                    client.bgrewriteaof()
                    info: Any = client.info
                    while info("persistence")["aof_rewrite_in_progress"]:
                        pass
                client.xadd("rows", {"row": f"{number}\0\xff" * 50})
        self.server.kill()

    def rows(self) -> int:
        """Start Redis; how many rows it has."""
        self.server.start()
        try:
            with self.server.client() as client:
                length: Any = client.xlen("rows")
                assert client.get("next") is None
                return int(length)
        finally:
            self.server.kill()


@pytest.fixture(params=[False, True], ids=["commands", "snapshot"])
def data(tmp_path: Path, request: pytest.FixtureRequest) -> Data:
    made = Data(tmp_path / "my runs")
    made.fill(snapshot=request.param)
    assert made.path.read_bytes().startswith(b"REDIS") == request.param
    return made


@pytest.mark.parametrize("kind", UNFINISHED)
def test_an_unfinished_write_is_cut_off_and_kept_and_every_row_is_there(
    data: Data, kind: str
) -> None:
    whole, end = data.path.read_bytes(), UNFINISHED[kind]
    data.path.write_bytes(whole + end)
    told = data.mend()
    assert f"the last {len(end):,} bytes" in told
    assert "no acknowledged write is lost" in told
    assert data.path.read_bytes() == whole
    (kept,) = data.home.glob("appendonly.aof.cut-at-*")
    assert kept.read_bytes() == end
    assert kept.name in told
    assert data.mend() == ""
    assert data.rows() == WRITTEN


@pytest.mark.parametrize("kind", DAMAGED)
def test_other_damage_is_refused_and_the_command_in_the_error_repairs_it(
    data: Data, kind: str
) -> None:
    whole = data.path.read_bytes()
    data.path.write_bytes(whole + DAMAGED[kind])
    with pytest.raises(RedisDataDamaged, match=f"damaged from byte {len(whole):,} of") as caught:
        data.mend()
    assert caught.value.value == str(data.path)
    assert data.path.read_bytes() == whole + DAMAGED[kind]
    assert caught.value.remedy is not None
    _, _, after = caught.value.remedy.partition("in it: ")
    repair, _, _ = after.partition(" ; ")
    subprocess.run(
        repair, shell=True, check=True, input=b"y\n", capture_output=True, timeout=PATIENCE
    )
    assert data.path.read_bytes() == whole
    assert data.mend() == ""
    assert data.rows() == WRITTEN


@pytest.mark.parametrize("content", [bytes(9000), b"garbage" * 100, b"REDIS0009" + bytes(100)])
def test_a_file_without_a_whole_command_is_refused(tmp_path: Path, content: bytes) -> None:
    data = Data(tmp_path)
    data.path.write_bytes(content)
    with pytest.raises(RedisDataDamaged, match="does not begin with a whole command") as caught:
        data.mend()
    assert "from a backup" in (caught.value.remedy or "")
    assert data.path.read_bytes() == content


def test_a_file_that_is_gone_is_refused_where_a_redis_has_run(tmp_path: Path) -> None:
    data = Data(tmp_path)
    assert data.mend(expected=False) == ""
    with pytest.raises(RedisDataDamaged, match="is missing"):
        data.mend()
    data.path.touch()  # as a power cut before the first write leaves it
    assert data.mend() == ""
    shutil.rmtree(data.home)  # as the error's remedy says
    assert data.mend() == ""


def test_temporary_files_of_a_killed_redis_are_removed(tmp_path: Path) -> None:
    data = Data(tmp_path)
    (data.home / "temp-rewriteaof-17.aof").write_bytes(bytes(100))
    (data.home / "temp-17.rdb").write_bytes(bytes(100))
    data.mend(expected=False)
    assert list(data.home.iterdir()) == []


async def test_a_cluster_says_what_it_cut_and_refuses_to_begin_without_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stub_services(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    told: list[str] = []
    given = ClusterSettings(data_dir=tmp_path / "runs", start_seconds=90, stop_seconds=10)
    cluster = EmbeddedCluster(given, told.append)
    await cluster.start()
    await cluster.crash()
    path = tmp_path / "runs" / "redis" / "appendonly.aof"
    whole = command(b"SELECT", b"0") + command(b"SET", b"a", b"1")
    path.write_bytes(whole + bytes(4096))
    async with EmbeddedCluster(given, told.append):
        assert [line for line in told if "4,096 bytes" in line]
        assert path.read_bytes().startswith(whole)
    # Whole commands, one of which Redis does not know.
    good = path.read_bytes()
    path.write_bytes(good + command(b"SAT", b"b", b"2"))
    with pytest.raises(RedisDataDamaged, match="Unknown command 'SAT'") as caught:
        await EmbeddedCluster(given).start()
    assert "from a backup" in (caught.value.remedy or "")
    path.write_bytes(good)
    async with EmbeddedCluster(given, told.append):
        pass
    path.unlink()
    with pytest.raises(RedisDataDamaged, match="is missing"):
        await EmbeddedCluster(given).start()


words = st.lists(st.binary(max_size=40), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.lists(words, min_size=1, max_size=4), st.data())
def test_property_every_beginning_of_a_write_is_recognised(
    commands: list[list[bytes]], data: st.DataObject
) -> None:
    write = b"".join(command(*parts) for parts in commands)
    end = data.draw(st.integers(0, len(write)))
    assert _is_unfinished(write[:end])
    assert _is_unfinished(write[:end].rstrip(b"\0"))
    assert not _is_unfinished(write + b"\0" + data.draw(st.binary(min_size=1)))
