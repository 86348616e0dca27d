"""Interpreters of environments that tests make up: their packages, and the double of SGLang."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
SGLANG: Final = {"sglang": "0.5.21", "torch": "2.13.0", "nvidia-nccl-cu13": "2.29.7"}


def environment(
    place: Path, packages: Mapping[str, str], body: str = "", *, before: str = ""
) -> str:
    """An interpreter that finds the metadata of `packages` and, if `body` is given, a module torch
    with it. `before`: lines of its script that come first."""
    site = place / "site"
    for name, version in packages.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if body:
        (site / "torch.py").write_text(body)
    program = place / "python"
    program.write_text(f'#!/bin/sh\n{before}PYTHONPATH="{site}" exec "{sys.executable}" -S "$@"\n')
    program.chmod(0o755)
    return str(program)


def sglang_double(place: Path, packages: Mapping[str, str] = SGLANG) -> str:
    """An interpreter of an environment with SGLang that runs the double of it for `-m
    sglang.launch_server ARGS`."""
    run = (
        f'if [ "$1" = -m ]; then shift 2; PYTHONPATH="{ROOT}" exec "{sys.executable}" '
        '-m tests.support.sglang_process "$@"; fi\n'
    )
    return environment(place, packages, before=run)
