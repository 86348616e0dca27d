"""Model services on the devices of a host: residence, eviction, and faults."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from services.reward.gpu.manager import (
    ModelManager,
    ModelPlacement,
    ModelSettings,
    ModelUnavailable,
)
from services.reward.gpu.resident import ResidentModel
from tests.support.waiting import PATIENCE
from troupe.rpc import InvalidArgument
from troupe.scheduling.elastic.cells import DeviceCell, Model

SERVER = Path(__file__).parents[1] / "model_server.py"


def served(log: Path, *options: str, gpus: int = 1, **fields: Any) -> ModelSettings:
    command = (sys.executable, str(SERVER), "{port}", str(log), *options)
    return ModelSettings(command=command, gpus=gpus, start_seconds=PATIENCE, **fields)


@asynccontextmanager
async def manager(models: dict[str, ModelSettings], gpus: int) -> AsyncIterator[ModelManager]:
    made = ModelManager(models, gpus)
    try:
        yield made
    finally:
        await made.stop()


async def used(models: ModelManager, name: str) -> str:
    """One call from its begin to its end."""
    models.placement.room([name])
    models.placement.begin(name)
    try:
        return await models.ready(name)
    finally:
        models.placement.end(name)


async def test_the_least_recently_used_sleeps_and_its_devices_go_to_the_next(
    tmp_path: Path,
) -> None:
    logs = {name: tmp_path / name for name in "abc"}
    async with manager({name: served(log) for name, log in logs.items()}, 2) as models:
        for name in "abca":
            await used(models, name)
        # "c" took the devices of "a"; "a" came back on the devices that it was started on.
        assert logs["a"].read_text().split() == ["start", "0", "release", "0", "resume", "0"]
        assert logs["b"].read_text().split() == ["start", "1"]
        assert logs["c"].read_text().split() == ["start", "0", "release", "0"]
        assert models.residents() == {"a": 0, "b": 1}
        assert (models.restores, models.evictions) == (4, 2)


async def test_a_model_in_use_is_not_evicted(tmp_path: Path) -> None:
    settings = {"small": served(tmp_path / "s"), "large": served(tmp_path / "l", gpus=2)}
    async with manager(settings, 2) as models:
        models.placement.room(["small"])
        models.placement.begin("small")
        await models.ready("small")
        assert models.placement.room(["large", "small"]) == {"model:small": 0, "model:large": 0}
        with pytest.raises(ValueError, match="in use"):
            models.placement.begin("large")
        models.placement.end("small")
        await used(models, "large")
        assert models.residents() == {"large": 0}


async def test_a_restore_that_fails_is_said_and_the_next_call_tries_again(tmp_path: Path) -> None:
    settings = {"a": served(tmp_path / "a", "refuse=1"), "b": served(tmp_path / "b")}
    async with manager(settings, 1) as models:
        await used(models, "a")
        await used(models, "b")
        with pytest.raises(ModelUnavailable, match=r"a did not come back: 500.*out of memory"):
            await used(models, "a")
        assert models.residents() == {}
        await used(models, "a")
        assert models.residents() == {"a": 0}


async def test_a_server_that_keeps_its_memory_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "deaf"
    settings = {"deaf": served(log, "deaf"), "b": served(tmp_path / "b")}
    async with manager(settings, 1) as models:
        for name in ("deaf", "b", "deaf"):
            await used(models, name)
        assert log.read_text().split() == ["start", "0", "start", "0"]


async def test_a_command_finds_its_devices_among_those_of_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5, 6")
    logs = {name: tmp_path / name for name in "abc"}
    json_is_no_gap = '{"max_position": {"x": 1}}'
    models = {
        "a": served(logs["a"], json_is_no_gap),
        "b": served(logs["b"], gpus=2),
        "c": served(logs["c"], gpus=2),
    }
    async with manager(models, 4) as host:
        await used(host, "a")
        host.placement.put("b", DeviceCell(2, 2))
        with pytest.raises(ModelUnavailable, match="device 3 is wanted"):
            await used(host, "b")
        host.placement.put("a", None)
        await used(host, "c")
    assert logs["a"].read_text().split()[:2] == ["start", "4"]
    assert logs["c"].read_text().split() == ["start", "4,GPU-5"]


async def test_a_model_that_does_not_start_is_said(tmp_path: Path) -> None:
    settings = {
        "gone": ModelSettings(command=(sys.executable, "-c", "raise SystemExit(3)")),
        "nothing": ModelSettings(command=("/no/such/program",)),
        "dumb": ModelSettings(
            command=(sys.executable, "-c", "import time; time.sleep(60)"), start_seconds=0.3
        ),
    }
    async with manager(settings, 1) as models:
        for name, why in (
            ("gone", "ended with 3"),
            ("nothing", "No such file"),
            ("dumb", "did not start in 0.3 s"),
        ):
            with pytest.raises(ModelUnavailable, match=why):
                await used(models, name)
        assert models.residents() == {}


async def test_a_process_that_died_is_started_again(tmp_path: Path) -> None:
    log = tmp_path / "a"
    async with manager({"a": served(log)}, 1) as models:
        url = await used(models, "a")
        process = models._services["a"]._process
        assert process is not None
        process.kill()
        await process.wait()
        assert await used(models, "a") != url
        assert log.read_text().split() == ["start", "0"] * 2


def test_a_model_that_fits_no_cell_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no cell of the 2"):
        ModelManager({"judge": ModelSettings(entrypoint="m:f", gpus=4)}, 2)
    with pytest.raises(ValidationError, match="models take"):
        ModelSettings(entrypoint="m:f", gpus=3)
    with pytest.raises(ValidationError, match="exactly one"):
        ModelSettings(entrypoint="m:f", url="http://x")
    with pytest.raises(ValidationError, match="a cell of `gpus`"):
        ModelSettings(url="http://x", gpus=2, devices=(1, 2))


def test_models_begin_on_the_planned_devices() -> None:
    clock: Callable[[], float] = iter(range(100)).__next__
    board = ModelPlacement(4, [Model(name, 2, concurrency=2) for name in "abc"], clock)
    assert board.room(["a", "b", "c"]) == {"model:a": 2, "model:b": 2, "model:c": 0}
    assert {board.begin("a").first, board.begin("b").first} == {0, 2}
    board.end("a")
    assert board.room(["c"])["model:c"] == 2
    assert board.begin("c") == DeviceCell(0, 2)
    assert board.models["a"].cell is None


@pytest.mark.slow
async def test_torch_models_come_back_from_shared_memory_as_they_were(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(SERVER.parent))
    settings = {
        name: ModelSettings(entrypoint=f"reward_models:{kind}", start_seconds=300)
        for name, kind in (("linear", "Linear"), ("judge", "Judge"))
    }
    from reward_models import Judge, Linear  # type: ignore[import-not-found]

    asked: dict[str, dict[str, Any]] = {
        "linear": {"features": [1.0, -2.0, 0.5, 3.0]},
        "judge": {"ids": [3, 5, 7, 9]},
    }
    expected = {"linear": float(Linear().score(**asked["linear"]).detach())}
    expected["judge"] = float(Judge().score(**asked["judge"]).detach())

    async with manager(settings, 1) as models, httpx.AsyncClient(trust_env=False) as http:

        async def score(url: str, name: str) -> httpx.Response:
            body = {"method": "score", "arguments": asked[name]}
            return await http.post(f"{url}/call", json=body, timeout=PATIENCE)

        urls = {}
        for name in ("linear", "judge", "linear", "judge"):
            urls[name] = await used(models, name)
            reply = await score(urls[name], name)
            assert reply.json()["result"] == pytest.approx(expected[name], abs=1e-6)
        assert models.evictions == 3
        asleep = await score(urls["linear"], "linear")
        assert (asleep.status_code, "in host memory" in asleep.text) == (500, True)
        directory = models._folder.path
        assert {path.stem for path in directory.iterdir()} == {"linear", "judge"}
    assert not directory.exists()
    with pytest.raises(TypeError, match="no torch modules"):
        ResidentModel(object(), tmp_path / "copy")
