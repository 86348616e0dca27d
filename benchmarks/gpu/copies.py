"""Training state between a device and pinned host memory: `python -m benchmarks.gpu.copies`.

A policy is suspended and resumed at the rate of these copies. All tensors of a model's weights and
moments, as they are, against one buffer of as many bytes: what the link gives at best. On a CPU
both are copies within memory.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.command import finish, run_program
from benchmarks.gpu.update import DEFAULT, TINY, seconds_of
from troupe.twin.costs import model_config


def shapes_of(large: bool) -> list[torch.Size]:
    """Of the parameters and both moments of each."""
    with torch.device("meta"):
        sizes = model_config(DEFAULT) if large else TINY
        config = AutoConfig.for_model(**sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return [parameter.shape for parameter in model.parameters() for _ in range(3)]


def measure(device: torch.device, *, quick: bool) -> dict[str, float]:
    """GiB/s each way, and their share of the link's."""
    pinned = device.type == "cuda"
    shapes = shapes_of(pinned and not quick)
    here = [torch.zeros(shape, device=device) for shape in shapes]
    there = [torch.zeros(shape, pin_memory=pinned) for shape in shapes]
    total = sum(t.numel() for t in here)
    whole = torch.zeros(total, device=device), torch.zeros(total, pin_memory=pinned)

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> float:
        def all_of_them() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

        return total * 4 / 2**30 / seconds_of(all_of_them, device, 3)

    found = {
        "gib": total * 4 / 2**30,
        "out_gib_s": copy(there, here),
        "in_gib_s": copy(here, there),
        "link_out_gib_s": copy([whole[1]], [whole[0]]),
        "link_in_gib_s": copy([whole[0]], [whole[1]]),
    }
    found["of_link"] = min(
        found["out_gib_s"] / found["link_out_gib_s"], found["in_gib_s"] / found["link_in_gib_s"]
    )
    return found


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    finish(measure(torch.device(options.device), quick=options.quick), quiet=True)


if __name__ == "__main__":
    run_program(main)
