"""Memory and time of writing a checkpoint from the training state of one device or of ranks.

The state of a model of 500 M parameters (float32) is written to `--ranks` files, as gangs do, and
becomes a checkpoint in bfloat16 in a separate process, whose resident memory is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, run_program

# Parameters: an embedding of 156 M, tied, and 22 layers of 15.7 M.
_MODEL: Final = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 22,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
_QUICK: Final = {**_MODEL, "vocab_size": 8192, "num_hidden_layers": 2}
_PROCESS: Final = Path("/proc/self")
_MMAP_THRESHOLD: Final = -3


def outline(quick: bool) -> Any:
    """Return the model without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3", **(_QUICK if quick else _MODEL))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def keep(folder: Path, quick: bool, ranks: int) -> None:
    """Distribute the rows of every parameter over one file per rank, like
    torch.distributed.checkpoint."""
    import torch
    from safetensors.torch import save_file

    for rank in range(ranks):
        mine, where = {}, {}
        for name, tensor in outline(quick).named_parameters():
            rows = len(tensor)
            start, end = (rows * at // ranks for at in (rank, rank + 1))
            mine[name] = torch.zeros(end - start, *tensor.shape[1:])
            where[name] = {"saved_offsets": [start] + [0] * (tensor.ndim - 1)}
        about = {"DCP_SHARDING_INFO": json.dumps(where)}
        save_file(mine, folder / f"shard-{rank + 1:05d}.safetensors", metadata=about)


def write(kept: Path, target: Path, quick: bool) -> dict[str, float]:
    """Write the checkpoint in this process; return its time, and its memory relative to the weights
    and to the largest tensor of the checkpoint."""
    import torch

    from services.trainer.state.checkpoint import save_checkpoint
    from troupe.checkpoints.reading import StoredTensors

    model, stored = outline(quick), StoredTensors(sorted(kept.iterdir()))
    nbytes = [2 * tensor.numel() for tensor in stored.layout.values()]
    # Freed blocks are returned to the kernel, so that only memory in use is measured.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)
    (_PROCESS / "clear_refs").write_text("5")
    before, began = _resident("VmRSS"), time.perf_counter()
    save_checkpoint(target, model, stored, None, keep=1, dtype=torch.bfloat16)
    grown = _resident("VmHWM") - before
    return {
        "seconds": time.perf_counter() - began,
        "gigabytes": sum(nbytes) / 1e9,
        # The trainer's weights, in float32.
        "rss_over_weights": grown / (2 * sum(nbytes)),
        "rss_over_largest": grown / max(nbytes),
    }


def _resident(field: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def measure(ranks: int, quick: bool) -> dict[str, float]:
    """Run `write` in a new process, on the files of `ranks` ranks."""
    with tempfile.TemporaryDirectory() as name:
        kept = Path(name) / "kept"
        kept.mkdir()
        keep(kept, quick, ranks)
        command = [sys.executable, "-m", "benchmarks.checkpoints", "--write", name]
        done = subprocess.run(
            [*command, *(["--quick"] if quick else [])], capture_output=True, text=True, check=True
        )
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def main() -> None:
    """Measure, print a table, and end with a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        place = options.write / "solver" / "v1"
        print(json.dumps(write(options.write / "kept", place, options.quick)))
        return
    found = {ranks: measure(ranks, options.quick) for ranks in options.ranks}
    if not options.json:
        table = Table("ranks", "GB", "seconds", "memory / weights", "memory / largest tensor")
        for ranks, one in found.items():
            shown = (one["gigabytes"], one["seconds"], one["rss_over_weights"])
            table.add_row(
                str(ranks), *(f"{value:.3g}" for value in shown), f"{one['rss_over_largest']:.2f}"
            )
        Console().print(table)
    report = {
        "checkpoint_rss_ratio": round(max(o["rss_over_weights"] for o in found.values()), 3),
        "checkpoint_rss_over_largest": round(max(o["rss_over_largest"] for o in found.values()), 3),
        "checkpoint_seconds": round(max(o["seconds"] for o in found.values()), 2),
    }
    finish(report, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
