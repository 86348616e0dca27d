"""Published weights on their way into engines of one host: copies, seconds, and seconds paused.

    python -m benchmarks.weights [--quick] [--json] [--cache | --real [--python PYTHON] [--small]]

A trainer's `Transfer` publishes versions into shared memory, and the rollout service's code brings
the engines of a policy to them: fetch, verification, waves, load, proof. All bytes are published
and verified. Two kinds of engines:

- paced: no model; a load reads every page of the published file and takes as long as the links of
  its devices would (`LINK`; one device per 32 GiB). Sizes over 2 GiB are moved in parts of 2 GiB,
  so that 4 GiB are resident.
- `--cache`: an embedded engine under turns that never stop, with `engine.cache` `recompute` and
  `keep`: tokens/s, and the mismatch (k3) between log-probs of the engine and of a full pass by the
  version that each token names. A version moves weights by 0.1 % of their size.
- `--real`: SGLang servers, launched as a job's are (`--python`: what has SGLang; without it the
  variables of the slow tests), with a model of half a billion parameters (`--small`: 47 million);
  the former ways, by handles and by value, compared with reading in place.

The last line is one JSON object. `copies`: bytes that this host's memory grew by while a first
version was published and loaded (files in shared memory, and this process's own memory, which is
trainer and rollout service; not what servers hold), per byte of it. `paused_fraction`: of the
update (publishing to verified), in which one engine generated nothing. `four_over_one`: seconds of
an update of four engines, divided by the seconds of one. They are of the largest paced size, `real`
of servers. `gathers_per_version` (paced): how often the ranks of a gang gather a version that is
published, proved, and loaded by three servers from the trainer's device
(`benchmarks.transfer.gathers`). `proof_on_trainer`: whether versions come with proofs that the
trainer's device has computed (`benchmarks.transfer.proofs`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from benchmarks.command import finish, run_program, scratch
from benchmarks.sglang import HALF_BILLION, TINY
from benchmarks.transfer.gathers import gathers_per_version
from benchmarks.transfer.proofs import proof_on_trainer
from services.rollout.engines.base import ServingEngine, Tensors
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.weights import skeleton
from services.rollout.serving.policy import ServedPolicy
from testbed.simulated_engine import SimulatedEngine
from troupe.job import EngineSpec, ModelSpec, PolicySpec, SimulatedSpec
from troupe.transfer import DeferredTensors, TensorGroup, Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling
from troupe.workflow.languages import Language

POLICY: Final = "solver"
GIB: Final = 1 << 30
PART_BYTES: Final = 2 * GIB
TENSOR_BYTES: Final = 64 << 20
# Bytes per second of one device's link (PCIe 4 x16), and bytes of weights that one device holds: a
# larger model is served by several devices, each of which loads its part over its own link.
LINK: Final = 25e9
DEVICE_BYTES: Final = 32 * GIB
SMALL: Final = HALF_BILLION | {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}
Way = Literal["auto", "tensor", "disk"]


@dataclass(frozen=True)
class Row:
    """One measured update: medians over versions after the first, `copies` of the first."""

    engines: int
    num_bytes: int
    way: str
    publish_seconds: float
    update_seconds: float
    paused_seconds: float
    copies: float
    served_all_along: bool

    @property
    def seconds(self) -> float:
        """From the trainer's tensors to the last engine's proof."""
        return self.publish_seconds + self.update_seconds

    @property
    def paused_fraction(self) -> float:
        """Of those seconds, in which one engine generated nothing."""
        return self.paused_seconds / self.seconds


class PacedEngine(SimulatedEngine):
    """An engine without a model whose loads touch every page of the published weights and last as
    long as its `links`, of `LINK` bytes/s each, need for them."""

    only_copies = True
    links = 1

    async def _apply(self, tensors: Tensors, ref: common_pb.WeightsRef) -> float:
        began = time.monotonic()
        size = sum(tensor.nbytes for tensor in tensors.values())
        await asyncio.to_thread(_touch, tensors)
        await asyncio.sleep(max(0.0, size / (LINK * self.links) - (time.monotonic() - began)))
        self._drawing = ref.version
        self._way = "in_place"
        return time.monotonic() - began


def _touch(tensors: Tensors) -> int:
    """Read one byte of every page, as a device's copy engine has them mapped."""
    return sum(int(t.view(torch.uint8).view(-1)[::4096].sum()) for t in tensors.values())


class MemoryGrowth:
    """How far shared memory below a directory, and this process's own memory, grow in a block."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._ended = threading.Event()
        self.num_bytes = 0

    def __enter__(self) -> MemoryGrowth:
        self._before = self._held()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.num_bytes = max(self.num_bytes, self._held() - self._before)

    def _held(self) -> int:
        files: dict[int, int] = {}
        torch_files = Path("/dev/shm").glob(f"torch_{os.getpid()}_*")
        for path in (*self._place.rglob("*"), *torch_files):
            try:
                status = path.stat()
            except OSError:
                continue
            files[status.st_ino] = status.st_blocks * 512
        status_lines = Path("/proc/self/status").read_text().splitlines()
        anonymous = next(line for line in status_lines if line.startswith("RssAnon:"))
        return sum(files.values()) + int(anonymous.split()[1]) * 1024


class Bench:
    """A policy with engines on this host, and a trainer that publishes for it."""

    def __init__(self, engines: list[ServingEngine], spec: PolicySpec, place: Path) -> None:
        self._place = place
        self._trainer = Transfer(place)
        self._number = 0
        self.engines = engines
        rollout = Transfer(place)
        first = self._publish({"w": torch.zeros(1)} if spec.simulated else None)
        self.policy = ServedPolicy(
            POLICY, cast(Language, None), engines, rollout, spec.engine, first
        )

    def weights(self, version: int) -> DeferredTensors:
        """The tensors of a version. Kinds of benches define it."""
        raise NotImplementedError

    def _publish(self, tensors: Any = None) -> common_pb.WeightsRef:
        version, self._number = self._number, self._number + 1
        key = f"bench/{POLICY}/weights@{version}"
        self._trainer.delete(f"bench/{POLICY}/weights@{version - 2}")
        manifest = self._trainer.set(key, tensors or self.weights(version))
        return common_pb.WeightsRef(
            job_id="bench",
            policy=POLICY,
            version=version,
            key=key,
            checksum=manifest.checksum,
            num_bytes=manifest.num_bytes,
        )

    async def update(self) -> tuple[float, float, float, bool, int]:
        """Publish and load a version: seconds of each, seconds that one engine paused, whether the
        policy served all along, bytes."""
        began = time.perf_counter()
        ref = await asyncio.to_thread(self._publish)
        published = time.perf_counter()
        task = asyncio.create_task(self.policy.update(ref))
        fewest = self.policy.serving
        while not task.done():
            fewest = min(fewest, self.policy.serving)
            await asyncio.sleep(0.002)
        exposed = await task / len(self.engines)
        updated = time.perf_counter()
        return published - began, updated - published, exposed, fewest > 0, ref.num_bytes

    async def measure(self, rounds: int, parts: int) -> Row:
        """`rounds` updates of `parts` parts each, after a first one whose memory is watched."""
        try:
            await self.policy.bring_up()
            with MemoryGrowth(self._place) as growth:
                *_, size = await self.update()
            await self.update()  # the second file is allocated
            found = []
            for _ in range(rounds):
                steps = [await self.update() for _ in range(parts)]
                found.append([sum(step[at] for step in steps) for at in range(3)])
            publish, load, paused = map(statistics.median, zip(*found, strict=True))
            report = self.engines[0].last_update
            return Row(
                engines=len(self.engines),
                num_bytes=size * parts,
                way=report.way if report else "?",
                publish_seconds=publish,
                update_seconds=load,
                paused_seconds=paused,
                copies=growth.num_bytes / size,
                served_all_along=all(step[3] for step in steps),
            )
        finally:
            await self.policy.release("the benchmark is over")
            self._trainer.clear("bench")
            self._trainer.close()


class PacedBench(Bench):
    """Paced engines; the trainer's tensors are made from one buffer as they are published."""

    def __init__(self, count: int, part_bytes: int, links: int, place: Path) -> None:
        self._part_bytes = part_bytes
        self._buffer = torch.randint(0, 1 << 15, (TENSOR_BYTES // 2,), dtype=torch.int16)
        simulated = SimulatedSpec(load_seconds=0.0)
        model = ModelSpec(config=TINY, tokenizer="none")
        engine = EngineSpec(kind="embedded", replicas=count)
        spec = PolicySpec(model=model, engine=engine, simulated=simulated)
        engines = [PacedEngine(f"bench.{n}", POLICY, spec) for n in range(count)]
        for one in engines:
            one.links = links
        super().__init__(list(engines), spec, place)

    def weights(self, version: int) -> DeferredTensors:
        """2 GiB in tensors of 64 MiB, of which the first differs by version."""
        shape = torch.empty(self._buffer.shape, dtype=torch.int16, device="meta")
        self._buffer[0] = version
        names = [f"layers.{n}.weight" for n in range(self._part_bytes // TENSOR_BYTES)]
        return DeferredTensors([self._group(name, shape) for name in names])

    def _group(self, name: str, shape: torch.Tensor) -> TensorGroup:
        return TensorGroup({name: shape}, lambda: {name: self._buffer})


class RealBench(Bench):
    """SGLang servers of one model with random weights."""

    def __init__(
        self, count: int, config: dict[str, Any], way: Way, python: str, place: Path
    ) -> None:
        engine = EngineSpec(
            kind="sglang",
            python=python,
            replicas=count,
            max_running=4,
            max_context=64,
            start_timeout_seconds=900,
            update=way,
            launch=["--max-total-tokens", "512", "--mem-fraction-static", "0.5"],
        )
        model = ModelSpec(config=config, dtype="bfloat16", tokenizer="none")
        spec = PolicySpec(model=model, engine=engine)
        # Tensors of the checkpoint; a version adds a little to the last norm.
        layout = skeleton(AutoConfig.for_model(**config), "bfloat16", POLICY)
        generator = torch.Generator().manual_seed(0)
        self._tensors = {
            name: (torch.randn(tensor.shape, generator=generator) * 0.02).to(tensor.dtype)
            + (1.0 if "norm" in name else 0.0)
            for name, tensor in layout.state_dict().items()
            if name != "lm_head.weight"
        }
        engines: list[ServingEngine] = [
            SglangEngine(f"bench.{n}", POLICY, spec, replica=n) for n in range(count)
        ]
        super().__init__(engines, spec, place)

    def weights(self, version: int) -> Any:
        """The same but for one tensor."""
        changed = self._tensors["model.norm.weight"] + 0.1 * version
        return {**self._tensors, "model.norm.weight": changed}


def paced(sizes: Sequence[int], counts: Sequence[int], rounds: int) -> Iterator[Row]:
    """Paced engines: the first size with all `counts`, others with one and four engines."""
    for size in sizes:
        for count in counts if size == sizes[0] else (1, 4):
            part = min(size, PART_BYTES)
            with scratch() as place:
                bench = PacedBench(count, part, -(-size // DEVICE_BYTES), Path(place))
                yield asyncio.run(bench.measure(rounds, size // part))


def real(
    config: dict[str, Any], counts: Sequence[int], python: str, rounds: int, place: Path
) -> Iterator[Row]:
    """Real servers, one after another and together, and the former ways with one server."""
    python = python or sglang_interpreter(place)
    cases: list[tuple[int, Way]] = [(count, "auto") for count in counts]
    for count, way in (*cases, (1, "tensor")):
        with scratch() as directory:
            bench = RealBench(count, config, way, python, Path(directory))
            yield asyncio.run(bench.measure(rounds, 1))


def sglang_interpreter(place: Path) -> str:
    """What takes `-m sglang.launch_server ARGS`, by the variables of the slow tests."""
    return find_sglang(place) or sys.exit(
        "no SGLang: give --python, or set TROUPE_SGLANG_CPU_TOOL and TROUPE_SGLANG_CPU_DIR"
    )


def find_sglang(place: Path) -> str:
    """The same; "" if the variables name none."""
    if python := os.environ.get("TROUPE_SGLANG_PYTHON"):
        return str(Path(python).expanduser())
    tool, where = (os.environ.get(f"TROUPE_SGLANG_CPU_{name}") for name in ("TOOL", "DIR"))
    if not tool or not where:
        return ""
    subprocess.run([tool, "setup", where], check=True, timeout=900)
    wrapper = place / "python"
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] || exec "{where}/bin/python" "$@"\n'
        f'shift 2\nexec "{tool}" serve "{where}" "$@"\n'
    )
    wrapper.chmod(0o755)
    return str(wrapper)


@dataclass(frozen=True)
class CacheRow:
    """Turns under updates. `mismatch`: mean of exp(d) - 1 - d over tokens, d the full pass's
    log-prob minus the engine's; `mixed`: fraction of turns of several versions."""

    cache: str
    tokens_per_second: float
    updates_per_second: float
    mismatch: float
    mixed: float


async def under_updates(cache: Literal["recompute", "keep"], quick: bool, place: Path) -> CacheRow:
    """Sixteen turns at once with prompts of 512 tokens, new weights after every 1,000 tokens."""
    prompt_tokens, answer_tokens, turns, each = (64, 48, 16, 300) if quick else (512, 128, 24, 1000)
    config = SMALL | {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
    }
    engine_spec = EngineSpec(
        max_running=16, max_context=prompt_tokens + answer_tokens, in_flight="keep", cache=cache
    )
    model_spec = ModelSpec(config=config, dtype="float32", tokenizer="none")
    engine = EmbeddedEngine("bench.0", POLICY, PolicySpec(model=model_spec, engine=engine_spec))
    transfer = Transfer(place)
    generator = torch.Generator().manual_seed(0)
    layout = skeleton(AutoConfig.for_model(**config), "float32", POLICY).state_dict()
    now = {
        name: torch.randn(tensor.shape, generator=generator) * 0.1 + ("norm" in name)
        for name, tensor in layout.items()
        if name != "lm_head.weight"
    }
    versions = [now]

    async def load() -> None:
        number = len(versions) - 1
        key = f"bench/{POLICY}/weights@{number}"
        manifest = transfer.set(key, versions[number])
        ref = common_pb.WeightsRef(
            job_id="bench", policy=POLICY, version=number, key=key, checksum=manifest.checksum
        )
        await engine.update_weights(ref, transfer)

    await engine.start()
    await load()
    prompts = torch.randint(0, 2048, (turns, prompt_tokens), generator=generator).tolist()
    gate, answers = asyncio.Semaphore(16), {}

    async def turn(number: int) -> None:
        sampling = Sampling(max_new_tokens=answer_tokens, seed=number)
        async with gate:
            answers[number] = await engine.generate(
                f"t{number}", prompts[number], sampling, deadline_seconds=1800
            )

    began = time.perf_counter()
    task = asyncio.gather(*(turn(number) for number in range(turns)))
    while not task.done():
        await asyncio.sleep(0.005)
        if engine.load().generated_tokens >= each * len(versions):
            moved = {
                name: tensor + tensor.std() * 1e-3 * torch.randn(tensor.shape, generator=generator)
                for name, tensor in versions[-1].items()
                if tensor.dim() > 1
            }
            versions.append(versions[-1] | moved)
            await load()
    await task
    seconds = time.perf_counter() - began
    await engine.stop()
    differences: list[float] = []
    for number, weights in enumerate(versions):
        model = skeleton(AutoConfig.for_model(**config), "float32", POLICY)
        model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
        for at, answer in answers.items():
            spans = [span for span in answer.versions if span.version == number]
            if not spans:
                continue
            ids = torch.tensor([[*prompts[at], *answer.token_ids]])
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits[0, prompt_tokens - 1 : -1]
            table = torch.log_softmax(logits, dim=-1)
            for span in spans:
                differences += [
                    float(table[i, answer.token_ids[i]]) - answer.logprobs[i]
                    for i in range(span.start, span.end)
                ]
    found = torch.tensor(differences, dtype=torch.float64)
    return CacheRow(
        cache=cache,
        tokens_per_second=turns * answer_tokens / seconds,
        updates_per_second=(len(versions) - 1) / seconds,
        mismatch=float((found.exp() - 1 - found).mean()),
        mixed=sum(len(answer.versions) > 1 for answer in answers.values()) / turns,
    )


def measure_cache(*, quick: bool, quiet: bool) -> None:
    """Print what keeping the cache saves, and what it costs."""
    rows = []
    for cache in ("recompute", "keep"):
        with scratch() as place:
            rows.append(asyncio.run(under_updates(cache, quick, Path(place))))
    if not quiet:
        table = Table("cache", "tokens/s", "updates/s", "mismatch (k3)", "turns of two versions")
        for row in rows:
            table.add_row(
                row.cache,
                f"{row.tokens_per_second:.0f}",
                f"{row.updates_per_second:.2f}",
                f"{row.mismatch:.2e}",
                f"{row.mixed:.0%}",
            )
        Console().print(table)
    before, after = rows
    found = {
        "kind": "cache",
        "keep_over_recompute": round(after.tokens_per_second / before.tokens_per_second, 3),
        "mismatch_recompute": before.mismatch,
        "mismatch_keep": after.mismatch,
    }
    finish(found, quiet=quiet)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--json", action="store_true", help="the last line only")
    parser.add_argument("--real", action="store_true", help="SGLang servers, not paced engines")
    parser.add_argument("--cache", action="store_true", help="what keeping the cache saves")
    parser.add_argument("--python", default="", help="what has SGLang")
    parser.add_argument("--small", action="store_true", help="a real model of 47 M parameters")
    parser.add_argument("--gib", type=int, nargs="+", default=[4, 16, 64], help="sizes, paced")
    parser.add_argument("--servers", type=int, nargs="*", default=[1, 2, 4])
    options = parser.parse_args()
    if options.cache:
        measure_cache(quick=options.quick, quiet=options.json)
        return
    rounds = 1 if options.quick else 3
    progress = Console(stderr=True, quiet=options.json)
    table = Table(
        *("engines", "GB", "way", "publish s", "update s", "paused s", "paused", "copies", "GB/s"),
        title="weights into engines",
    )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as place:
        if options.real:
            config = SMALL if options.small else HALF_BILLION
            if options.quick:
                config = TINY
            made = real(config, options.servers, options.python, rounds, Path(place))
        else:
            sizes = [GIB // 4] if options.quick else [gib * GIB for gib in options.gib]
            made = paced(sizes, (1, 4) if options.quick else (1, 2, 4), 1)
        for row in made:
            progress.print(row)
            rows.append(row)
            table.add_row(
                str(row.engines),
                f"{row.num_bytes / 1e9:.2f}",
                row.way,
                f"{row.publish_seconds:.2f}",
                f"{row.update_seconds:.2f}",
                f"{row.paused_seconds:.3f}",
                f"{row.paused_fraction:.1%}",
                f"{row.copies:.2f}",
                f"{row.num_bytes / row.seconds / 1e9:.2f}",
            )
    if not options.json:
        Console().print(table)
    in_place = [row for row in rows if row.way == "in_place"]
    largest = max(row.num_bytes for row in in_place)
    seconds = {row.engines: row.seconds for row in in_place if row.num_bytes == largest}
    four = seconds[4] / seconds[1] if {1, 4} <= seconds.keys() else None
    found = {
        "kind": "sglang" if options.real else "paced",
        "proof_on_trainer": asyncio.run(proof_on_trainer()),
        "copies": round(max(row.copies for row in in_place), 3),
        "paused_fraction": round(
            max(row.paused_fraction for row in in_place if row.num_bytes == largest), 4
        ),
        "four_over_one": None if four is None else round(four, 3),
        "served_all_along": all(row.served_all_along for row in rows if row.engines > 1),
        "gigabytes": round(largest / 1e9, 2),
        "update_seconds": {str(count): round(value, 3) for count, value in seconds.items()},
    }
    if not options.real:
        found["gathers_per_version"] = asyncio.run(gathers_per_version())
    finish(found, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
