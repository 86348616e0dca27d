"""Generate `troupe/v1/` from `protos/`: messages, gRPC stubs and their `.pyi`.

`--check` writes nothing and fails when the committed stubs are stale (CI runs it).
"""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGET = ROOT / "troupe" / "v1"
PACKAGE_DOC = '"""Generated from `protos/troupe/v1` by `make protos`; never edited by hand."""\n'


def generate(out: Path) -> None:
    """Run protoc for every file under `protos/` into `out` (which gets `troupe/v1/`)."""
    sources = sorted(str(p) for p in PROTOS.rglob("*.proto"))
    plugins = Path(sys.executable).parent
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *sources,
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")
    (out / "troupe" / "v1" / "__init__.py").write_text(PACKAGE_DOC)


def main() -> int:
    """Write the stubs, or with `--check` compare them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the stubs are stale")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        generate(out)
        fresh = {p.name: p for p in (out / "troupe" / "v1").iterdir()}
        present = {p.name: p for p in TARGET.glob("*") if p.is_file()}
        stale = sorted(
            name
            for name in fresh.keys() | present.keys()
            if name not in fresh
            or name not in present
            or not filecmp.cmp(fresh[name], present[name], shallow=False)
        )
        if args.check:
            if stale:
                print(f"stale stubs: {', '.join(stale)}; run `make protos`", file=sys.stderr)
            return 1 if stale else 0
        TARGET.mkdir(parents=True, exist_ok=True)
        for name in stale:
            if name in fresh:
                (TARGET / name).write_bytes(fresh[name].read_bytes())
            else:
                present[name].unlink()
        print(f"{len(stale)} of {len(fresh)} stubs written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
