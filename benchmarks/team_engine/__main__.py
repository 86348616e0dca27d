"""A team on one engine: adapters of several policies over one base, served in the same passes.

    OMP_NUM_THREADS=1 python -m benchmarks.team_engine [--quick] [--json] [--half] [--only PART]

Parts: `embedded`, and real servers where the environment names them (`TROUPE_SGLANG_PYTHON`,
`TROUPE_VLLM_PYTHON`, or the CPU tools of the slow tests): `sglang`, `vllm`. SmolLM2-135M's shape
with random weights (`--quick`: a tiny model, two roles on a server), in float32, or in bfloat16
(`--half`); adapters of rank 8 on all linear layers. The last line is one JSON object with an object
per part:

- `memory_over_one_base`: by number of roles, the proportional set size (PSS) of the processes that
  serve them, as a ratio of those that serve the bare base, after equally many turns. Embedded:
  each in a process of its own; `adapter_mib`: what a further role adds. Servers are launched one
  after another; `memory_apart`: the same ratio of a server of its own per role.
- `tokens_shared_over_apart` (servers): by number k of roles, tokens per CPU second of the server of
  all roles, as a ratio of a server of one role with a k-th of the turns: k of those need k times
  its CPU time for as many tokens. Medians of rounds. `shared_tokens_per_second`,
  `one_role_tokens_per_second`: with all turns, while nothing else runs.
- `tokens_over_one_policy`, `per_cpu_second` (embedded): by number of roles, tokens per second, and
  per CPU second of the process, of all roles together, as ratios of one policy's with as many
  turns; medians of rounds, in which all alternate. `one_policy`: its tokens per CPU second.
- `adapter_over_bare` (embedded): one policy's tokens per CPU second with an adapter, divided by the
  figure of the bare base with as many turns. An adapter that is merged into a copy of the base
  costs nothing per token. `merge_cpu_seconds`, `update_cpu_seconds`: of making and verifying that
  copy, and of loading an adapter next to the base.
- `updates` under turns of four roles; `first_token_ms`: from the publication of an adapter, which
  ends an optimizer step, to the end of its first turn of one token. `wrong_versions`: turns that
  name several versions or an old one, or whose log-probs differ from the merged weights of the
  version that they name; `lost_turns`: turns that failed. Both must be 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from rich.console import Console

from benchmarks.command import finish, options_of, run_program
from benchmarks.team_engine.embedded import embedded
from benchmarks.team_engine.servers import served
from benchmarks.team_engine.team import FULL, QUICK, Plan
from troupe.client.cli.options import make_table

PARTS: Final[dict[str, Callable[[Plan, bool], dict[str, Any]]]] = {
    "embedded": embedded,
    "sglang": partial(served, "sglang"),
    "vllm": partial(served, "vllm"),
}


def main() -> None:
    """Measure and print."""
    options = options_of(
        __doc__, None, parts=tuple(PARTS), flags={"half": "serve the base in bfloat16"}
    )
    torch.set_num_threads(1)
    plan = QUICK if options.quick else FULL
    if options.half:
        plan = replace(plan, dtype="bfloat16")
    wanted = {name: part for name, part in PARTS.items() if options.only in (None, name)}
    measured = {name: part(plan, name == options.only) for name, part in wanted.items()}
    found = {name: figures for name, figures in measured.items() if figures}
    if not options.json:
        for name, figures in found.items():
            table = make_table(["figure"], ["value"], f"A team on one engine: {name}")
            for figure, value in figures.items():
                table.add_row(figure, str(value))
            Console().print(table)
    finish({"quick": options.quick, **found}, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
