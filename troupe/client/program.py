"""Jobs made of the running program: functions, classes and rows in place of names and paths.

Functions of modules are named, and the modules are sent with the job as `code:` sends them.
Functions of the program's main file, or of a notebook's cells, cannot be imported elsewhere: they
and all that they use are written into the module `troupe_main`, as source text. Nothing is pickled.
"""

from __future__ import annotations
import __future__

import ast
import gzip
import importlib.util
import inspect
import io
import linecache
import re
import symtable
import sys
import tokenize
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

from troupe.functions.sources import collect, digest, walk
from troupe.job import JobSpec
from troupe.job.loading import job_of
from troupe.outcomes import NotJsonError, json_text
from troupe.rpc.errors import InvalidArgument
from troupe.v1 import reward_pb2 as reward_pb
from troupe.workflow.loading import is_users_module

MAIN: Final = "troupe_main"
"""The module with the functions of the program's main file or notebook."""
_ROWS: Final = "troupe_rows"
_MAIN: Final = ("__main__", "__mp_main__")
# What has a connection, or a job, of this process.
_OWN: Final = "troupe.client"
_LITERALS: Final = (bool, int, float, str, bytes, type(None))
_MOVE: Final = "Define it at the top level of the program or of a module."


@dataclass(frozen=True)
class ProgramJob:
    """A job made of the running program: its specification, and the files that are sent with it."""

    spec: JobSpec
    files: Sequence[reward_pb.SourceFile]


def job_of_program(fields: Mapping[str, Any]) -> JobSpec | ProgramJob:
    """Return the job that `fields` describe, the fields of a job file.

    Where the file has the name of a function or class, `fields` may have the object itself, also as
    a whole reward or tool. `tasks` may be a list of rows (mappings of JSON values), or have `rows`,
    and `held_out` rows, in place of the names of files. A policy may be just its model's path, and
    an agent just its policy. With `code`, exactly the files that it names are sent, in place of the
    modules that the functions come from and their imports.

    Raises `InvalidArgument`, which names the field, for parts that cannot be sent, and
    `troupe.job.JobSpecError`.
    """
    program = _Program()
    raw = program.fields_of(dict(fields))
    if not program.captured:
        return job_of(raw)
    given = raw.get("code")
    if isinstance(given, Mapping) and given.get("sha256"):
        raise InvalidArgument(
            "names files that the cluster has, but the job has functions or rows of this program",
            field="code.sha256",
            value=given["sha256"],
            remedy="Remove it, or name functions as `module:function`.",
        )
    # Before the code is read, so that a mistake in the job is reported first.
    spec = job_of({**raw, "code": given or {"include": [MAIN]}})
    if given is not None and spec.code is not None:
        code = spec.code
        found = collect(Path(code.root), code.include, code.exclude)
        files = {file.path: file.content for file in found} | program.own_files()
    else:
        files = program.own_files() | program.module_files()
    sent = [
        reward_pb.SourceFile(path=path, content=content) for path, content in sorted(files.items())
    ]
    tops = sorted({path.partition("/")[0] for path in files})
    raw["code"] = {"include": tops, "sha256": digest(sent)}
    return ProgramJob(job_of(raw), sent)


class _Program:
    """The objects of the running program that a job refers to."""

    def __init__(self) -> None:
        self._rows: dict[str, bytes] = {}
        self._main: _MainModule | None = None
        # Importable modules of the user, by top-level name, with the field that refers to them.
        self._modules: dict[str, str] = {}

    @property
    def captured(self) -> bool:
        """Whether the job needs files of this program."""
        return bool(self._rows or self._main or self._modules)

    def fields_of(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return a job's fields with names and paths in place of objects and rows."""
        for name, short in (("policies", _policy), ("agents", _agent), *_FUNCTIONS):
            if isinstance(section := fields.get(name), Mapping):
                fields[name] = {key: short(value) for key, value in section.items()}
        if (tasks := fields.get("tasks")) is not None:
            fields["tasks"] = self._tasks_of(tasks)
        return {str(name): self._named(value, str(name)) for name, value in fields.items()}

    def own_files(self) -> dict[str, bytes]:
        """Return the rows, and the module with the functions of the main file."""
        files = dict(self._rows)
        if self._main is not None:
            files[f"{MAIN}.py"] = self._main.text().encode()
        return files

    def module_files(self) -> dict[str, bytes]:
        """Return the files of the user's modules that the job needs, with their imports."""
        queue = deque((top, field) for top, field in self._modules.items())
        if self._main is not None:
            queue.extend((top, MAIN) for top in self._main.modules)
        found: dict[str, bytes] = {}
        done: set[str] = set()
        while queue:
            top, field = queue.popleft()
            if top in done:
                continue
            done.add(top)
            for name, path in _files_of(top):
                try:
                    found[name] = path.read_bytes()
                except OSError as error:
                    raise InvalidArgument(
                        f"its file {path} cannot be read: {error.strerror}",
                        field=field,
                        value=top,
                        remedy="Make it readable, or name the files to send with `code`.",
                    ) from error
                if name.endswith(".py"):
                    queue.extend((one, field) for one in _imports_of(found[name]))
        return found

    def _tasks_of(self, tasks: Any) -> Any:
        if isinstance(tasks, Mapping):
            fields = dict(tasks)
            rows = fields.pop("rows", None)
            if rows is None:
                return fields
        elif is_rows(tasks):
            fields, rows = {}, tasks
        elif callable(tasks):
            return {"source": tasks}
        elif isinstance(tasks, str | Path):
            return {"dataset": str(tasks)}
        else:
            raise InvalidArgument(
                "is neither rows nor a class, a data set or a section of a job",
                field="tasks",
                value=type(tasks).__name__,
                remedy="Give a list of dicts, a class, a path, or fields such as "
                '{"dataset": "openai/gsm8k"}.',
            )
        fields["dataset"] = self._add_rows(_ROWS, rows, "tasks.rows")
        if is_rows(held_out := fields.get("held_out")):
            fields["held_out"] = self._add_rows(f"{_ROWS}_held_out", held_out, "tasks.held_out")
        return fields

    def _add_rows(self, name: str, rows: Any, field: str) -> str:
        """Keep rows as a compressed file, and return its name."""
        if not is_rows(rows) or not len(rows):
            raise InvalidArgument(
                "is not a list of rows, or is empty",
                field=field,
                value=type(rows).__name__,
                remedy="Give a list of dicts of JSON values.",
            )
        text = io.BytesIO()
        # No time and no name in the header: equal rows are equal files.
        with gzip.GzipFile(filename="", mode="wb", fileobj=text, mtime=0) as file:
            for number, row in enumerate(rows):
                try:
                    line = json_text(dict(row))
                except (NotJsonError, TypeError, ValueError) as error:
                    raise InvalidArgument(
                        f"is not a mapping of JSON values: {error}",
                        field=f"{field}.{number}",
                        value=str(row)[:80],
                        remedy="Rows hold strings, finite numbers, booleans, None, lists, dicts.",
                    ) from error
                file.write(line.encode() + b"\n")
        path = f"{name}.jsonl.gz"
        self._rows[path] = text.getvalue()
        return path

    def _named(self, value: Any, field: str) -> Any:
        """Return `value` with entrypoints in place of functions and classes, at any depth."""
        if isinstance(value, Mapping):
            return {str(key): self._named(one, f"{field}.{key}") for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._named(one, f"{field}.{at}") for at, one in enumerate(value)]
        if isinstance(value, Path):
            return str(value)
        return self._entrypoint(value, field) if callable(value) else value

    def _entrypoint(self, value: Any, field: str) -> str:
        """Return `module:name` of a function or class, and note what has to be sent for it."""
        name, module = getattr(value, "__qualname__", ""), getattr(value, "__module__", "") or ""
        if not name or not name.isidentifier():
            where = " inside another function or class" if "." in name else ""
            raise InvalidArgument(
                f"is not a function or class with a name of its own{where}",
                field=field,
                value=name or type(value).__name__,
                remedy=_MOVE,
            )
        if module in _MAIN:
            if self._main is None:
                self._main = _MainModule(vars(sys.modules[module]))
            self._main.add(name, value, field)
            return f"{MAIN}:{name}"
        if getattr(sys.modules.get(module), name, None) is not value:
            raise InvalidArgument(
                f"is not what '{module}' has under this name",
                field=field,
                value=name,
                remedy=_MOVE,
            )
        if is_users_module(module):
            self._modules.setdefault(module.partition(".")[0], field)
        return f"{module}:{name}"


class _MainModule:
    """The part of the program's main file or notebook that functions need, as a module's text."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._statements: list[str] = []
        # Names whose statements are written, or being written.
        self._seen: set[str] = set()
        self._future = False
        self.modules: set[str] = set()
        """Top-level names of the user's modules that the text imports."""

    def add(self, name: str, value: Any, field: str) -> None:
        """Write the function or class `name`, with all that it uses."""
        if name in self._seen:
            return
        waiting = deque([(name, value)])
        while waiting:
            one, own = waiting.popleft()
            for later in self._write(one, own, field):
                waiting.append((later, self._names[later]))

    def text(self) -> str:
        """Return the module's text."""
        future = ["from __future__ import annotations"] if self._future else []
        return "\n\n".join([*future, *self._statements]) + "\n"

    def _write(self, name: str, value: Any, field: str) -> list[str]:
        """Write the statement that binds `name`, after what it needs when it is executed; return
        the names that it uses later, when its functions are called."""
        if name in self._seen:
            return []
        self._seen.add(name)
        statement = self._imported(name, value) or _literal(name, value)
        if statement is not None:
            self._statements.append(statement)
            return []
        statement = self._defined(name, value, field)
        at_once, later = _names_in(statement)
        # With all that those use later, since the statement may call them.
        waiting = deque(sorted(at_once & self._names.keys()))
        while waiting:
            one = waiting.popleft()
            waiting.extend(self._write(one, self._names[one], field))
        if statement not in self._statements:
            self._statements.append(statement)
        return sorted(later & self._names.keys())

    def _imported(self, name: str, value: Any) -> str | None:
        """Return the import of a module, or of an object that a module has; None for others."""
        if isinstance(value, types.ModuleType):
            if value.__name__ in _MAIN:
                return None
            self._note(value.__name__)
            # After `import a.b` the name `a` gives access to `a.b`.
            inner = f"{value.__name__}."
            parts = [one for one in self._all_imports() if one.startswith(inner)]
            return "\n".join(
                [f"import {value.__name__} as {name}", *map("import {}".format, parts)]
            )
        module = getattr(value, "__module__", None)
        own = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        if not isinstance(module, str) or not isinstance(own, str) or module in _MAIN:
            return None
        if getattr(sys.modules.get(module), own, None) is not value:
            return None
        self._note(module)
        return f"from {module} import {own} as {name}"

    def _all_imports(self) -> list[str]:
        found = set()
        for text in _sources(self._names):
            with suppress(SyntaxError, ValueError):
                nodes = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Import)]
                found |= {one.name for node in nodes for one in node.names if not one.asname}
        return sorted(found)

    def _note(self, module: str) -> None:
        if is_users_module(module):
            self.modules.add(module.partition(".")[0])

    def _defined(self, name: str, value: Any, field: str) -> str:
        """Return the statement of the program that defines `name`. Raises `InvalidArgument`."""

        def refuse(why: str, remedy: str) -> InvalidArgument:
            return InvalidArgument(
                f"uses '{name}', {why}" if self._seen - {name} else why,
                field=field,
                value=name,
                remedy=remedy,
            )

        if type(value).__module__.partition(":")[0].startswith(_OWN):
            raise refuse(
                f"a {type(value).__name__} of this process, which workers do not have",
                "Pass what the function needs as rows, or as arguments of a tool.",
            )
        function = inspect.unwrap(value) if callable(value) else value
        if isinstance(function, types.FunctionType):
            code = function.__code__
            self._future |= bool(code.co_flags & __future__.annotations.compiler_flag)
            lines = linecache.getlines(code.co_filename)
            found = _binding(["".join(lines)], name, code.co_firstlineno)
        else:
            found = _binding(_sources(self._names), name)
        if found is None:
            raise refuse(
                f"a {type(value).__name__} whose source cannot be found",
                "Write the program to a file or a notebook, save it before it starts, and define "
                "the name at the top level; or put it into a module.",
            )
        return ast.unparse(found)


def is_rows(value: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether a value can be rows: a sequence that is not text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _policy(value: Any) -> Any:
    return {"model": {"path": str(value)}} if isinstance(value, str | Path) else value


def _agent(value: Any) -> Any:
    return {"policy": value} if isinstance(value, str) else value


def _function(value: Any) -> Any:
    return {"entrypoint": value} if callable(value) else value


_FUNCTIONS: Final[tuple[tuple[str, Callable[[Any], Any]], ...]] = (
    ("tools", _function),
    ("rewards", _function),
)


def _literal(name: str, value: Any) -> str | None:
    """Return an assignment of the present value if Python can write it out."""
    if not _is_literal(value):
        return None
    return f"{name} = {value!r}"


def _is_literal(value: Any) -> bool:
    if type(value) in _LITERALS:
        return not isinstance(value, float) or value - value == 0  # finite
    if type(value) in (list, tuple, set):
        # An empty set has no literal.
        return all(map(_is_literal, value)) and (bool(value) or type(value) is not set)
    if type(value) is dict:
        return all(map(_is_literal, value)) and all(map(_is_literal, value.values()))
    return False


def _names_in(statement: str) -> tuple[set[str], set[str]]:
    """Return the names of the program that a statement uses when it is executed, and those that its
    functions use when they are called."""
    top = symtable.symtable(statement, MAIN, "exec")
    bound = {one.get_name() for one in top.get_symbols() if one.is_assigned()}
    at_once = {one.get_name() for one in top.get_symbols() if one.is_referenced()}
    later: set[str] = set()

    def visit(table: symtable.SymbolTable, *, executed: bool) -> None:
        # The body of a class is executed with it, the body of a function is not.
        executed = executed and table.get_type() == "class"
        names = {one.get_name() for one in table.get_symbols() if one.is_global()}
        (at_once if executed else later).update(names)
        for child in table.get_children():
            visit(child, executed=executed)

    for child in top.get_children():
        visit(child, executed=True)
    return at_once - bound, later - bound


def _binding(sources: Sequence[str], name: str, line: int | None = None) -> ast.stmt | None:
    """Return the last top-level statement that binds `name`, in the first source that has one;
    `line`: where it begins, decorators included."""
    for text in sources:
        try:
            statements = list(_top_level(ast.parse(text).body))
        except (SyntaxError, ValueError):
            continue
        for one in reversed(statements):
            begins = min([one.lineno, *(d.lineno for d in getattr(one, "decorator_list", []))])
            if name in _bound_by(one) and line in (None, begins):
                return one
    return None


def _top_level(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that bind names of the program, also within `if`, `try` and `with`."""
    for one in statements:
        yield one
        for part in ("body", "orelse", "finalbody"):
            if isinstance(one, ast.If | ast.Try | ast.With):
                yield from _top_level(getattr(one, part, []))


def _bound_by(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            inner = [node for target in targets for node in ast.walk(target)]
        case ast.AnnAssign(target=target, value=ast.expr()):
            inner = [target]
        case _:
            return set()
    return {one.id for one in inner if isinstance(one, ast.Name)}


def _sources(names: Mapping[str, Any]) -> list[str]:
    """Return the source texts of the main program, the newest first: a notebook's cells, or the
    main file."""
    shell = names.get("get_ipython")
    if callable(shell) and (cells := names.get("In")):
        convert = shell().transform_cell  # without %magics
        return [convert(cell) for cell in reversed(cells) if cell]
    if path := names.get("__file__"):
        with suppress(OSError, SyntaxError), tokenize.open(path) as file:
            return [file.read()]
    return []


def _files_of(top: str) -> list[tuple[str, Path]]:
    """Return the files of a user's module or package by their paths in a job's code; none for a
    module that is not the user's."""
    module = sys.modules.get(top)
    spec = getattr(module, "__spec__", None)
    if spec is None:
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(top)
    if spec is None:
        return []
    folders = [Path(one) for one in spec.submodule_search_locations or ()]
    origin = spec.origin if spec.has_location else None
    path = origin or (str(folders[0] / "__init__.py") if folders else "")
    if not path or not is_users_module(top, path):
        return []
    if not folders:
        file = Path(path)
        return [(file.name, file)]
    return [
        (f"{top}/{path.relative_to(folder).as_posix()}", path)
        for folder in folders
        for path in walk(folder)
    ]


def _imports_of(content: bytes) -> set[str]:
    """Return the top-level names of the modules that a source file imports anywhere."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return set()  # a worker that imports it reports the error
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def name_of(function: object) -> str:
    """Return a job's name from a function's name."""
    own = str(getattr(function, "__name__", function)).rpartition(":")[2].lower()
    return re.sub(r"[^a-z0-9]+", "-", own).strip("-")[:63] or "job"
