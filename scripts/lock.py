"""Pin every dependency: one requirements file per image, one for developers.

`uv pip compile` resolves `pyproject.toml`; `--upgrade` takes newer releases. The local part of
torch's version (`+cpu`) and the CUDA libraries that its default build pins by itself are dropped,
so that a lock serves CPU and CUDA builds alike.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "deploy" / "requirements"

# Rollout imports users' workflows and tasks, and reward their functions, so both contain the
# examples' packages. The reward workers do not need torch.
LOCKS = {
    # It computes meta-strategies of populations, exact games included.
    "orchestrator": ["orchestrator", "populations", "alpha-rank"],
    "experience-store": ["experience-store"],
    "rollout": ["rollout", "examples", "data"],
    "trainer": ["trainer", "examples", "networks", "data"],
    "reward": ["reward", "examples", "coding", "scoring", "mcp"],
    "control-panel": ["control-panel", "plan"],
    "dev": ["dev"],
    # Installed in addition to an image or the developers' environment, since it needs a C compiler.
    "reasoning-gym": ["reasoning-gym"],
}


CUDA_BUILD = re.compile(r"(?m)^(nvidia-(?!ml-py)|cuda-|triton==).*\n")


def lock(name: str, extras: list[str], upgrade: bool) -> None:
    """Write `deploy/requirements/{name}.txt`, keeping present pins unless `upgrade`."""
    out = TARGET / f"{name}.txt"
    command = [
        str(Path(sys.executable).parent / "uv"),
        *("pip", "compile", "--quiet", "--no-emit-index-url", "--no-emit-find-links"),
        *("--no-annotate", "--no-header", "--python-version", "3.11", "pyproject.toml"),
        *[part for extra in extras for part in ("--extra", extra)],
        *("-o", str(out)),
        *(["--upgrade"] if upgrade else []),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    pins = re.sub(r"(?m)^(torch==[\d.]+)\+\w+$", r"\1", out.read_text())
    out.write_text(CUDA_BUILD.sub("", pins))


def main() -> None:
    """Lock all, or the names given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *LOCKS])
    parser.add_argument("--upgrade", action="store_true")
    args = parser.parse_args()
    TARGET.mkdir(parents=True, exist_ok=True)
    for name in args.names or LOCKS:
        lock(name, LOCKS[name], args.upgrade)
        print(f"locked {name}")


if __name__ == "__main__":
    main()
