"""A policy's engines load new weights in waves; content on its host is not fetched again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch

from services.rollout.engines.base import Tensors
from services.rollout.engines.errors import UpdateFailed
from services.rollout.engines.requests import LoadedAhead
from services.rollout.serving.policy import ServedPolicy
from services.rollout.serving.weight_versions import WeightFetcher
from testbed.simulated_engine import SimulatedEngine
from tests.support.waiting import PATIENCE, until
from troupe.job import EngineSpec, ModelSpec, PolicySpec, SimulatedSpec
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.languages import Language

MODEL = {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1}


class SlowEngine(SimulatedEngine):
    """Loads for a while, side by side with others; `fails` does not."""

    loading: ClassVar[set[str]] = set()
    together: ClassVar[list[set[str]]] = []
    fails: ClassVar[set[str]] = set()

    async def _apply(self, tensors: Tensors, ref: common_pb.WeightsRef) -> float:
        self.loading.add(self.engine_id)
        self.together.append(set(self.loading))
        await asyncio.sleep(0.02)
        self.loading.discard(self.engine_id)
        if self.engine_id in self.fails and ref.version:
            raise UpdateFailed("broken", field="weights", value=ref.key, remedy="none")
        return 0.02


def publish(transfer: Transfer, version: int) -> common_pb.WeightsRef:
    key = f"job/p/weights@{version}"
    manifest = transfer.set(key, {"w": torch.full((4,), float(version))})
    return common_pb.WeightsRef(
        job_id="job", policy="p", version=version, key=key, checksum=manifest.checksum
    )


@pytest.mark.parametrize(
    ("count", "fails", "overlapping"),
    [(4, set(), True), (5, {"e0", "e1"}, True), (1, set(), True), (4, set(), False)],
)
async def test_half_of_the_engines_load_while_the_others_serve_where_steps_overlap(
    count: int,
    fails: set[str],
    overlapping: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together: list[set[str]] = []
    monkeypatch.setattr(SlowEngine, "together", together)
    monkeypatch.setattr(SlowEngine, "fails", fails)
    transfer = Transfer(tmp_path)
    spec = PolicySpec(
        model=ModelSpec(config=MODEL, tokenizer="none"),
        engine=EngineSpec(kind="embedded", replicas=count),
        simulated=SimulatedSpec(load_seconds=0),
    )
    engines = [SlowEngine(f"e{n}", "p", spec) for n in range(count)]
    language = cast(Language, None)
    ref = publish(transfer, 0)
    policy = ServedPolicy(
        "p", language, engines, transfer, spec.engine, ref, overlapping=overlapping
    )
    await policy.bring_up()
    together.clear()
    fewest = policy.serving
    task = asyncio.create_task(policy.update(publish(transfer, 1)))
    while not task.done():
        fewest = min(fewest, policy.serving)
        await asyncio.sleep(0.001)
    assert await task == pytest.approx(0.02 * (count - len(fails)))
    assert fewest >= (1 if count > 1 and overlapping else 0)
    if count == 4:
        assert max(map(len, together)) == (2 if overlapping else 4)
    ended = [engine for engine in engines if engine.engine_id not in fails]
    for engine in ended:
        report = engine.last_update
        assert report is not None
        assert (engine.version, report.version, report.way) == (1, 1, "mapped")
        assert report.total_seconds >= report.exposed_seconds == 0.02
    status = policy.statuses("job", "w")[-1]
    assert (status.update_way, status.update_exposed_seconds) == ("mapped", 0.02)
    await policy.release("done")


class RecordingTransfer(Transfer):
    """A source that records its fetches."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[tuple[str, str | None]] = []

    def fetch(self, key: str, *, base: str | None = None, **options: Any) -> Any:
        self.asked.append((key, base))
        return super().fetch(key, base=base, **options)


class AheadEngine(SimulatedEngine):
    """Takes weights before their commit."""

    def loads_ahead(self, ref: common_pb.WeightsRef) -> bool:
        return self.version == ref.version - 1

    @property
    def _num_bytes(self) -> int:
        return 0

    async def _apply_ahead(
        self, ref: common_pb.WeightsRef, starting: Callable[[], None]
    ) -> LoadedAhead | None:
        starting()
        return LoadedAhead(None, 0.5)

    async def _verify_ahead(self, ref: common_pb.WeightsRef, loaded: LoadedAhead) -> None:
        return


async def test_engines_that_have_loaded_a_version_serve_it_before_it_is_copied_to_their_host(
    tmp_path: Path,
) -> None:
    copied = threading.Event()

    class FarTransfer(RecordingTransfer):
        def fetch(self, key: str, *, base: str | None = None, **options: Any) -> Any:
            if key.endswith("@1"):
                assert copied.wait(PATIENCE)
            return super().fetch(key, base=base, **options)

    transfer = FarTransfer(tmp_path)
    spec = PolicySpec(
        model=ModelSpec(config=MODEL, tokenizer="none"),
        engine=EngineSpec(kind="embedded", replicas=2),
        simulated=SimulatedSpec(load_seconds=0),
    )
    engines = [AheadEngine(f"e{n}", "p", spec) for n in range(2)]
    language = cast(Language, None)
    policy = ServedPolicy("p", language, engines, transfer, spec.engine, publish(transfer, 0))
    await policy.bring_up()
    ref = publish(transfer, 1)
    ref.trained_on.step_result = "result"
    announced = common_pb.WeightsRef(job_id="job", policy="p", version=1, trained_on=ref.trained_on)
    assert await policy.load_ahead(announced) == 2
    assert await policy.prefetch(ref) == 0.0
    assert policy.serving == 0
    assert await policy.update(ref) == 1.0
    assert policy.serving == 2
    # Their host gets its copy nevertheless, for restarts.
    assert (ref.key, f"{ref.key[:-1]}0") not in transfer.asked
    copied.set()
    await until(lambda: (ref.key, f"{ref.key[:-1]}0") in transfer.asked)
    await policy.release("done")


async def test_another_host_sends_what_the_served_version_lacks(tmp_path: Path) -> None:
    transfer = RecordingTransfer(tmp_path)
    old, new = publish(transfer, 0), publish(transfer, 1)
    fetcher = WeightFetcher(transfer)
    await fetcher.fetch(old)
    await fetcher.fetch(new, old)
    await fetcher.fetch(new, new)
    assert transfer.asked == [(old.key, None), (new.key, old.key), (new.key, None)]
