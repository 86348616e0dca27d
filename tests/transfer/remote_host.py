"""Another host: a process with its own root and owner. `python -m tests.transfer.remote_host`.

Arguments: root, token, ucx (1 or 0), then optionally a MiB of state to set under `KEY` and under
`OTHER`. Prints the address, and serves until stdin closes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from pydantic import SecretStr

from troupe.transfer import Transfer
from troupe.transfer.remote import TransferOwner

KEY = "job/solver/weights@1"
OTHER = "job/critic/weights@1"


def state(mib: int) -> dict[str, torch.Tensor]:
    """Return the same state in every process: two matrices of `mib` MiB, and small tensors."""
    count = mib * 2**20 // 8
    return {
        "first": torch.arange(count, dtype=torch.int32),
        "second": torch.arange(count, dtype=torch.int32) * 7,
        "bias": torch.arange(5).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
    }


def main() -> None:
    root, token, use_ucx, mib = sys.argv[1:5]
    torch.set_num_threads(1)
    transfer = Transfer(Path(root))
    if int(mib):
        transfer.set(KEY, state(int(mib)))
        transfer.set(OTHER, state(int(mib)))
    port = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    owner = TransferOwner(transfer, port=port, token=SecretStr(token), use_ucx=use_ucx == "1")
    print(owner.address, flush=True)
    sys.stdin.read()
    owner.stop(0.1)


if __name__ == "__main__":
    main()
