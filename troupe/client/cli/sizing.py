"""`troupe job validate --devices`: which policies of a job fit on which devices, and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from troupe.devices import Device
from troupe.job import JobSpec
from troupe.job.sizing import SOLD, read_shape, setup_of
from troupe.scheduling.memory import ModelShape, RankMemory, TrainingSetup, rank_memory

_GB: Final = 1 << 30
Kind = tuple[str, int]  # class and memory in bytes


def show_sizing(spec: JobSpec, devices: Sequence[Device], console: Console) -> bool:
    """Print what each policy of a language model needs; whether each fits somewhere.

    Policies that share devices take turns, so each is judged by itself.
    """
    kinds = Counter((one.device_class, one.memory) for one in devices)
    fitting = True
    for name, policy in spec.policies.items():
        if policy.model is None or policy.simulated is not None:
            continue
        shape = read_shape(policy.model)
        if shape is None:
            console.print(
                f"{name}: its size is not known here, as this machine cannot read the model's "
                "configuration, or has no rule for its architecture; the trainer counts it",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            continue
        fitting &= _show_policy(spec, name, shape, kinds, console)
    return fitting


def _show_policy(
    spec: JobSpec, name: str, shape: ModelShape, kinds: Counter[Kind], console: Console
) -> bool:
    rows = [_judged(spec, name, shape, kind, count) for kind, count in sorted(kinds.items())]
    setup, parts = rows[0].setup, sorted({part for row in rows for part in row.needed.parts})
    order = [part for part in RankMemory.__dataclass_fields__ if part in parts]
    about = "frozen" if not setup.trainable else "LoRA" if setup.adapter else "all weights"
    table = Table(
        title=f"{name}: {shape.parameters / 1e9:.2f} B parameters, {about}; GB on each device",
        title_justify="left",
    )
    for column in ("devices", "gang", *(part.replace("_", " ") for part in order), "total", ""):
        table.add_column(column, justify="left" if column in ("devices", "") else "right")
    for row in rows:
        found = row.needed.parts
        table.add_row(
            row.devices,
            str(row.setup.ranks),
            *(f"{found.get(part, 0) / _GB:.1f}" for part in order),
            f"{row.needed.total / _GB:.1f}",
            row.verdict,
        )
    console.print(table)
    return any(row.fits for row in rows)


class _Judged:
    """One policy on one kind of device, with the gang that the job asks for."""

    def __init__(
        self,
        devices: str,
        setup: TrainingSetup,
        needed: RankMemory,
        smallest: int | None,
        kind: Kind,
        count: int,
    ) -> None:
        self.devices, self.setup, self.needed = devices, setup, needed
        self.fits = setup.ranks <= count and needed.total <= SOLD * kind[1]
        if self.fits:
            smaller = smallest is not None and smallest < setup.ranks
            self.verdict = f"fits; smallest gang: {smallest}" if smaller else "fits"
        elif smallest is not None:
            self.verdict = f"does not fit; smallest gang that fits: {smallest}"
        elif setup.ranks > count:
            self.verdict = f"a gang of {setup.ranks} needs more devices"
        elif setup.adapter or not setup.trainable:
            self.verdict = "does not fit, and is on one device"
        else:
            self.verdict = f"does not fit, nor on all {count}"


def _judged(spec: JobSpec, name: str, shape: ModelShape, kind: Kind, count: int) -> _Judged:
    device_class, memory = kind
    where = "cpu" if device_class.lower() == "cpu" else "cuda"

    def at(ranks: int | None) -> tuple[TrainingSetup, RankMemory]:
        setup = setup_of(spec, name, shape, device=where, memory=memory, ranks=ranks)
        return setup, rank_memory(shape, setup)

    setup, needed = at(None)
    sharded = not setup.adapter and setup.trainable
    sizes = range(1, count + 1) if sharded else (1,)
    smallest = next((size for size in sizes if at(size)[1].total <= SOLD * memory), None)
    label = f"{count} x {device_class} {memory / _GB:g} GB"
    return _Judged(label, setup, needed, smallest, kind, count)
