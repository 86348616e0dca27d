"""The description of the machine in every benchmark's output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import PATIENCE, block_until

_PROGRAM = """
from benchmarks.command import finish
finish({"ratio": 1.5}, quiet=False)
"""


@pytest.mark.parametrize(
    ("capability", "isa"), [("default", "default"), ("avx2", "AVX2"), (None, None)]
)
def test_the_instruction_sets_are_in_table_and_object(
    capability: str | None, isa: str | None
) -> None:
    asked = {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": isa}
    environment = {name: value for name, value in os.environ.items() if name not in asked}
    environment |= {name: value for name, value in asked.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
        env=environment,
    )
    line, last = done.stdout.splitlines()
    found = json.loads(last)
    assert found["ratio"] == 1.5
    assert "cores" in found["machine"]
    assert found["onednn_max_cpu_isa"] == (isa or "default")
    if capability == "default":
        assert found["cpu_capability"] == "DEFAULT"
    for name in ("machine", "cpu_capability", "onednn_max_cpu_isa"):
        assert found[name] in line


def test_every_benchmark_ends_by_it() -> None:
    """A command that prints its object by itself would not name its machine."""
    done = subprocess.run(
        ["git", "grep", "-l", "def main(", "--", "benchmarks"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    if done.returncode:
        pytest.skip("this is no git checkout")
    # Sides of a comparison, which another benchmark starts and reads; drawings of figures.
    sides = {
        f"benchmarks/{side}.py"
        for side in (
            "comlrl/comlrl_side",
            "end_to_end/trl_side",
            "papers/psro/openspiel",
            "papers/psro/openspiel_learned",
            "rollout/direct",
            "papers/sampling/ours",
            "papers/sampling/rllib",
            "papers/sampling/samplefactory",
            "trainer/ours",
            "trainer/theirs",
            "transfer/group_member",
            "papers/twin/pictures",
        )
    }
    for path in done.stdout.split():
        if path not in sides:
            text = Path(path).read_text(encoding="utf-8")
            assert "finish(" in text, path
            assert "run_program(main)" in text, path


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("module", ["experience_store", "panel", "papers.pipeline"])
def test_a_signal_ends_a_benchmark_with_all_that_it_started(
    module: str, number: signal.Signals
) -> None:
    process = psutil.Popen(
        [sys.executable, "-m", f"benchmarks.{module}", "--quick", "--json"],
        stdout=subprocess.DEVNULL,
    )

    def redis() -> list[psutil.Process]:
        return [one for one in process.children(recursive=True) if "redis" in one.name()]

    try:
        block_until(lambda: redis() or process.poll() is not None)
        assert process.poll() is None
        started = process.children(recursive=True)
        process.send_signal(number)
        assert process.wait(PATIENCE) == 128 + number
        block_until(lambda: not any(one.is_running() for one in started))
    finally:
        for one in (process, *process.children(recursive=True)) if process.is_running() else ():
            one.kill()


def test_directories_in_shared_memory_are_locked() -> None:
    """One without a lock is taken for a killed benchmark's, and removed by the next that starts."""
    for path in Path("benchmarks").rglob("*.py"):
        assert 'dir="/dev/shm"' not in path.read_text(encoding="utf-8"), path
