"""`python -m tests.support.sglang_process ARGS`: the double of SGLang as a launched server.

Takes what `sglang.launch_server` is given, and serves a random model of `--model-path`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import uvicorn

from tests.support.fake_sglang import FakeSglang


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", default="m")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--context-length", type=int, default=256)
    parser.add_argument("--refuses-after", type=int, default=-1, help="buckets of weights")
    parser.add_argument("--dies-after", type=int, default=-1, help="buckets of weights")
    given, _ = parser.parse_known_args()
    fake = FakeSglang(json.loads((given.model_path / "config.json").read_text()))
    fake.info |= {
        "served_model_name": given.served_model_name,
        "tp_size": given.tp_size,
        "context_length": given.context_length,
    }
    fake.buckets_left, fake.buckets_to_death = given.refuses_after, given.dies_after
    uvicorn.run(fake.app, port=given.port, log_level="warning", lifespan="off")


if __name__ == "__main__":
    main()
