"""Code that was uploaded: folders of files, known by the hash of what is in them."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from troupe.rpc import InvalidArgument, NotFound
from troupe.v1 import reward_pb2 as pb

_MOST_FILES: Final = 1000
_MOST_BYTES: Final = 16 * 2**20
# Of one file or folder, as file systems have them, and of a whole path.
_NAME_BYTES: Final = 255
_PATH_BYTES: Final = 1024


class Sources:
    """A private folder with one folder for each source; nothing in there is ever changed."""

    def __init__(self, root: Path | None = None) -> None:
        """`root` is made when it is needed; by default a new one, removed at the end."""
        self._root = root
        self._own = root is None

    def put(self, files: Sequence[pb.SourceFile]) -> str:
        """Keep `files`; returns their hash. Raises `InvalidArgument`."""
        _check(files)
        name = digest(files)
        target = self._folder() / name
        if not target.is_dir():
            draft = target.with_name(f".{name}.{secrets.token_hex(4)}")
            try:
                for file in files:
                    path = draft / file.path
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(file.content)
                # The folder around it is private; a sandbox, of another user, is shown this one.
                for path in (draft, *draft.rglob("*")):
                    path.chmod(0o755 if path.is_dir() else 0o644)
                draft.rename(target)
            except OSError:
                if not target.is_dir():  # else somebody was quicker
                    raise
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return name

    def find(self, sha256: str) -> Path:
        """The folder of a source. Raises `NotFound` (kind "source_not_found")."""
        path = self._folder() / sha256
        if not path.is_dir():
            raise NotFound(
                "no such source was uploaded here",
                kind="source_not_found",
                field="function.source_sha256",
                value=sha256,
                remedy="Upload it (again: this service forgets sources in a restart).",
            )
        return path

    def files(self, sha256: str) -> list[pb.SourceFile]:
        """What a source consists of, for hosts that have not got it. Raises `NotFound`."""
        root = self.find(sha256)
        return [
            pb.SourceFile(path=path.relative_to(root).as_posix(), content=path.read_bytes())
            for path in sorted(root.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        ]

    def close(self) -> None:
        """Remove what is only this service's."""
        if self._own and self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None

    def _folder(self) -> Path:
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="troupe-sources-"))
        self._root.mkdir(parents=True, exist_ok=True)
        return self._root


def digest(files: Sequence[pb.SourceFile]) -> str:
    """SHA-256 of paths and contents, each with its length before it, in the order of the paths."""
    sha = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.path):
        for part in (file.path.encode(), file.content):
            sha.update(len(part).to_bytes(8, "big"))
            sha.update(part)
    return sha.hexdigest()


def _check(files: Sequence[pb.SourceFile]) -> None:
    def refuse(value: object, message: str, remedy: str) -> None:
        raise InvalidArgument(message, field="files", value=value, remedy=remedy)

    if not files:
        refuse(0, "there is no file", "Upload at least the module of the entrypoint.")
    if len(files) > _MOST_FILES:
        refuse(
            len(files), f"more than {_MOST_FILES:,} files", "Install what is large as a package."
        )
    size = sum(len(file.content) for file in files)
    if size > _MOST_BYTES:
        refuse(
            f"{size:,} bytes",
            f"more than {_MOST_BYTES:,} bytes",
            "Upload code only; install what is large as a package, or mount it.",
        )
    seen: set[str] = set()
    for file in files:
        path = PurePosixPath(file.path)
        parts = file.path.split("/")
        if path.is_absolute() or not set(parts).isdisjoint({"", ".", ".."}) or "\0" in file.path:
            refuse(file.path, "leads out of the folder, or to no file", 'Name it like "a/b.py".')
        longest = max(len(part.encode()) for part in parts)
        if longest > _NAME_BYTES or len(file.path.encode()) > _PATH_BYTES:
            refuse(file.path[:80], "is too long a path", "Give files and folders shorter names.")
        if "__pycache__" in parts:
            refuse(file.path, "is what an interpreter made", "Upload the module itself.")
        if file.path in seen:
            refuse(file.path, "is there twice", "Name every file once.")
        seen.add(file.path)
    for file in files:
        if any(str(parent) in seen for parent in PurePosixPath(file.path).parents):
            refuse(file.path, "is inside a file", "A path is a file or a folder.")
