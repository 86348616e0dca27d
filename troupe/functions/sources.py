"""Transfer of user code between hosts: the selection of files, their hash, and the folder in which
a process keeps them.

Code is sent as paths and contents, identified by a SHA-256 over both; it is never pickled. Deployed
functions and jobs (`code:`) ship it in the same way.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from troupe.contracts import kinds
from troupe.disks import Scratch
from troupe.rpc import DataLoss, InvalidArgument, NotFound
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import reward_pb2 as reward_pb

if TYPE_CHECKING:
    from troupe.v1.orchestrator_pb2_grpc import OrchestratorAsyncStub

# Limits of one source, the files of a function or of a job.
MAX_FILES: Final = 1000
MAX_BYTES: Final = 16 * 2**20
# Limits of the name of one file or folder, as in file systems, and of a whole path.
_NAME_BYTES: Final = 255
_PATH_BYTES: Final = 1024
# Packages that every service has, in one release for all.
_OWN: Final = frozenset({"troupe", "services", "testbed"})
_OWN_REMEDY: Final = "Leave it out: every service has it in its own release."
# Number of files that the error about an oversized source names.
_NAMED: Final = 3
_READ_SECONDS: Final = 120.0


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder by path, without hidden ones, links and byte code."""
    for path in sorted(folder.iterdir()):
        if _ignored(path) or path.is_symlink():
            continue
        if path.is_dir():
            yield from walk(path)
        elif path.is_file():
            yield path


def collect(
    root: Path, include: Sequence[str], exclude: Sequence[str] = ()
) -> list[reward_pb.SourceFile]:
    """Return the files of a job's `code:`: the files below `root` that match `include` but not
    `exclude`.

    An entry of `include` is a file, a folder or a pattern (`conf/*.yaml`). Hidden files and byte
    code are included only if named. Raises `InvalidArgument` with the field at fault: an entry
    without a file, a link that leads nowhere or out of `root`, an unreadable file, too many files,
    or too large ones.
    """
    try:
        top = root.expanduser().resolve()
        usable = top.is_dir()
    except (OSError, RuntimeError):  # RuntimeError: a circle of links, a user without a home
        usable = False
    if not usable:
        raise _refused(
            "root", root, "is not a folder", "Name the folder that contains the modules."
        )
    found: dict[str, Path] = {}
    for name in include:
        if ".." in PurePosixPath(name).parts:
            remedy = f"Name files, folders or patterns below {top}, or another `root`."
            raise _refused("include", name, "leads through `..`", remedy)
        with _scanning(name):
            matches = [top] if name == "." else sorted(top.glob(name))
        if not matches:
            remedy = f"Name files, folders or patterns below {top}."
            raise _refused("include", name, "there is no such file", remedy)
        for match in matches:
            with _scanning(name):
                for path in _below(match, top, exclude):
                    found[path.relative_to(top).as_posix()] = path
    if own := next(filter(_is_own, sorted(found)), None):
        raise _refused("include", own, "belongs to Troupe's own package", _OWN_REMEDY)
    if not found:
        raise _refused("include", list(include), "names no file", "Include the job's modules.")
    _check_size({name: path.stat().st_size for name, path in found.items()})
    files: list[reward_pb.SourceFile] = []
    for name, path in sorted(found.items()):
        with _scanning(name):
            files.append(reward_pb.SourceFile(path=name, content=path.read_bytes()))
    return files


@contextmanager
def _scanning(name: str) -> Iterator[None]:
    """Turn errors of file systems and patterns about `name` into `InvalidArgument`."""
    try:
        yield
    except OSError as error:
        what = f"'{error.filename or name}' cannot be read: {error.strerror or error}"
        raise _refused("include", name, what, "Exclude it, or make it readable.") from error
    except (ValueError, NotImplementedError) as error:
        remedy = 'Write a pattern like "conf/*.yaml", or "**/*.yaml" for all folders.'
        raise _refused("include", name, f"is not a pattern: {error}", remedy) from error


def _below(path: Path, top: Path, exclude: Sequence[str]) -> Iterator[Path]:
    """Yield the files at or below `path`. Raises `InvalidArgument` for a link that cannot be
    followed."""
    own = PurePosixPath(path.relative_to(top).as_posix())
    if any(fnmatchcase(str(one), pattern) for one in (own, *own.parents) for pattern in exclude):
        return
    bad = ""
    try:
        if not path.resolve(strict=True).is_relative_to(top):
            bad = "leads out of the folder"
        elif path.is_symlink() and path.is_dir():  # links between folders may form circles
            bad = "is a link to a folder"
    except (FileNotFoundError, RuntimeError):  # RuntimeError: a circle
        bad = "is a link that leads nowhere"
    if bad:
        remedy = "Exclude it, or replace it with its target."
        raise _refused("include", str(own), bad, remedy)
    if path.is_dir():
        for one in sorted(path.iterdir()):
            if not _ignored(one):
                yield from _below(one, top, exclude)
    elif path.is_file():
        yield path


def _ignored(path: Path) -> bool:
    return path.name.startswith(".") or path.name == "__pycache__"


def _is_own(path: str) -> bool:
    """Return whether an import of Troupe's packages would find the file (`troupe/x.py`,
    `troupe.py`, `troupe.so`)."""
    return path.partition("/")[0].partition(".")[0] in _OWN


def _check_size(sizes: Mapping[str, int]) -> None:
    total = sum(sizes.values())
    if len(sizes) <= MAX_FILES and total <= MAX_BYTES:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_NAMED]
    named = ", ".join(f"{name} ({sizes[name]:,} bytes)" for name in largest)
    raise _refused(
        "include",
        f"{len(sizes):,} files of {total:,} bytes",
        f"is more than {MAX_FILES:,} files or {MAX_BYTES:,} bytes; the largest are {named}",
        "Exclude files that are not code: put data where every host finds them, or into a package.",
    )


def _refused(field: str, value: object, message: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(message, field=f"code.{field}", value=value, remedy=remedy)


class SourceStore:
    """Sources by hash: a private folder with one unchanging folder per source."""

    def __init__(self, root: Path | None = None) -> None:
        """Open the store. `root` is created when it is needed; by default it is temporary, and
        `close` removes it."""
        self._root = root
        self._own: Scratch | None = None

    def put(self, files: Sequence[reward_pb.SourceFile]) -> str:
        """Keep `files`, and return their hash. Raises `InvalidArgument`."""
        check_files(files)
        name = digest(files)
        target = self._folder() / name
        if not target.is_dir():
            draft = target.with_name(f".{name}.{secrets.token_hex(4)}")
            try:
                for file in files:
                    path = draft / file.path
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(file.content)
                # The folder around it is private; a sandbox, which runs as another user, sees this
                # one.
                for path in (draft, *draft.rglob("*")):
                    path.chmod(0o755 if path.is_dir() else 0o644)
                draft.rename(target)
            except OSError:
                if not target.is_dir():  # else another upload of it was faster
                    raise
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return name

    def find(self, sha256: str) -> Path:
        """Return the folder of a source. Raises `NotFound` (kind "source_not_found")."""
        path = self._folder() / sha256
        if not path.is_dir():
            raise NotFound(
                "this source was not uploaded here",
                kind=kinds.SOURCE_NOT_FOUND,
                field="function.source_sha256",
                value=sha256,
                remedy="Upload it (again: this service forgets sources when it restarts).",
            )
        return path

    def files(self, sha256: str) -> list[reward_pb.SourceFile]:
        """Return the files of a source, to send them to other hosts. Raises `NotFound`."""
        root = self.find(sha256)
        return [
            reward_pb.SourceFile(path=path.relative_to(root).as_posix(), content=path.read_bytes())
            for path in sorted(root.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        ]

    async def fetch(self, sha256: str, orchestrator: OrchestratorAsyncStub) -> Path:
        """Return the folder of a job's source, which is fetched from the orchestrator if it is not
        here.

        Raises `NotFound` if the orchestrator does not have it, and `DataLoss` if it arrives
        damaged.
        """
        with suppress(NotFound):
            return self.find(sha256)
        request = orchestrator_pb.ReadCodeRequest(sha256=sha256)
        files = (await orchestrator.ReadCode(request, timeout=_READ_SECONDS)).files
        if await asyncio.to_thread(digest, files) != sha256:
            raise DataLoss(
                "the files of the job's code are not those that were submitted",
                field="code.sha256",
                value=sha256,
                remedy="Submit the job again.",
            )
        await asyncio.to_thread(self.put, files)
        return self.find(sha256)

    def close(self) -> None:
        """Remove the temporary folder."""
        if self._own is not None:
            self._own.close()
            self._own = self._root = None

    def _folder(self) -> Path:
        if self._root is None:
            self._own = Scratch("troupe-sources-", Path(tempfile.gettempdir()))
            self._root = self._own.path
        self._root.mkdir(parents=True, exist_ok=True)
        return self._root


def digest(files: Sequence[reward_pb.SourceFile]) -> str:
    """Return the SHA-256 over path and content of each file, sorted by path; each part is preceded
    by its length (8 bytes)."""
    sha = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.path):
        for part in (file.path.encode(), file.content):
            sha.update(len(part).to_bytes(8, "big"))
            sha.update(part)
    return sha.hexdigest()


def check_files(files: Sequence[reward_pb.SourceFile]) -> None:
    """Raise `InvalidArgument` for files that cannot be kept below one folder, or for too many
    files."""

    def refuse(value: object, message: str, remedy: str) -> None:
        raise InvalidArgument(message, field="files", value=value, remedy=remedy)

    if not files:
        refuse(0, "there is no file", "Upload at least the module of the entrypoint.")
    if len(files) > MAX_FILES:
        refuse(len(files), f"more than {MAX_FILES:,} files", "Install large contents as a package.")
    size = sum(len(file.content) for file in files)
    if size > MAX_BYTES:
        refuse(
            f"{size:,} bytes",
            f"more than {MAX_BYTES:,} bytes",
            "Upload code only; install large contents as a package, or mount it.",
        )
    seen: set[str] = set()
    for file in files:
        path = PurePosixPath(file.path)
        parts = file.path.split("/")
        if path.is_absolute() or not set(parts).isdisjoint({"", ".", ".."}) or "\0" in file.path:
            refuse(file.path, "leads out of the folder, or not to a file", 'Name it like "a/b.py".')
        longest = max(len(part.encode()) for part in parts)
        if longest > _NAME_BYTES or len(file.path.encode()) > _PATH_BYTES:
            refuse(file.path[:80], "is too long", "Give files and folders shorter names.")
        if "__pycache__" in parts:
            refuse(file.path, "is byte code", "Upload the module itself.")
        if _is_own(file.path):
            refuse(file.path, "belongs to Troupe's own package", _OWN_REMEDY)
        if file.path in seen:
            refuse(file.path, "occurs twice", "Name every file once.")
        seen.add(file.path)
    for file in files:
        if any(str(parent) in seen for parent in PurePosixPath(file.path).parents):
            refuse(file.path, "is inside a file", "A path must be either a file or a folder.")
