"""Writes docs/sdk.md, the reference of the Python SDK, from its docstrings.

`python -m scripts.sdk` writes the page; a test holds it against the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

import troupe
from troupe import client
from troupe.rpc import errors

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "sdk.md"
_BEGIN: Final = """# The Python SDK

<!-- Generated from the docstrings by `python -m scripts.sdk` (`make docs`). Do not edit. -->

`troupe.train` trains what a program describes; `troupe.client.Client` submits jobs to a cluster,
watches them, and uses what they trained. `AsyncClient`, `AsyncJobHandle` and `AsyncFunctions` have
the same methods for programs with an event loop: `await` each, or `async for` where one yields.
Every error is a `troupe.rpc.TroupeError` with `kind`, `field`, `value` and `remedy`, except
`troupe.job.JobSpecError`, whose `problems` list the faults of a job.
"""
# Each with its asyncio form, which has the docstrings.
HANDLES: Final[dict[type, type]] = {
    client.Client: client.AsyncClient,
    client.JobHandle: client.AsyncJobHandle,
    client.Functions: client.AsyncFunctions,
}
DECLARATIONS: Final[dict[str, Callable[..., Any]]] = {
    "troupe.reward": troupe.reward,
    "troupe.tool": troupe.tool,
}


def public(kind: type) -> list[str]:
    """Return the names of a class's own public methods, in the order of its text."""
    return [name for name, one in vars(kind).items() if callable(one) and not name.startswith("_")]


def page() -> str:
    """Return the text of docs/sdk.md."""
    parts = [_BEGIN, "## Train\n", *_function("troupe.train", troupe.train)]
    for kind, native in HANDLES.items():
        parts += [f"## {kind.__name__}\n", _text(kind if kind is client.Client else native)]
        if kind is client.Client:
            parts += _function("Client", vars(native)["__init__"], heading="Client(...)")
        for name in public(kind):
            documented = getattr(native, name)
            own = getattr(kind, name)
            parts += _function(f"{kind.__name__}.{name}", own, documented)
    parts.append("## Declarations of functions\n")
    for name, function in DECLARATIONS.items():
        parts += _function(name, function)
    parts += [
        "## Records\n",
        "Frozen dataclasses that methods return or yield. An `Event` of `JobHandle.watch` is a\n"
        "`StateChanged`, `MetricsLogged`, `Notice` or `Activity`; `print` shows it as one line.\n",
    ]
    parts += [part for kind in records() for part in _record(kind)]
    parts.append("## Errors\n")
    parts += [f"- `{kind.__name__}`: {_first(kind)}" for kind in failures()]
    return "\n".join(parts).rstrip() + "\n"


def records() -> Iterator[type]:
    """Yield the public records and enums of the client, by name."""
    for name in sorted(client.__all__):
        one = getattr(client, name)
        if isinstance(one, type) and (dataclasses.is_dataclass(one) or issubclass(one, Enum)):
            yield one


def failures() -> Iterator[type]:
    """Yield the errors of calls, by name."""
    found = {one for one in vars(errors).values() if _is_error(one)}
    found |= {one for name in client.__all__ if _is_error(one := getattr(client, name))}
    yield from sorted(found, key=lambda kind: kind.__name__)


def _is_error(one: Any) -> bool:
    return isinstance(one, type) and issubclass(one, errors.TroupeError)


def _function(name: str, function: Any, documented: Any = None, heading: str = "") -> Iterator[str]:
    signature = inspect.signature(function)
    given = [p for p in signature.parameters.values() if p.name != "self"]
    shown = signature.replace(parameters=given)
    if heading:
        shown = shown.replace(return_annotation=inspect.Signature.empty)
    # Annotations are strings, which `str` quotes.
    text = re.sub(r"(?<=[:>] )'([^']+)'", r"\1", str(shown))
    text = re.sub(r"<function [^>]*<lambda> at 0x[0-9a-f]+>", "...", text)
    yield f"### `{heading or name}`\n"
    last = name.rpartition(".")[2]
    yield f"```python\n{_wrapped(f'def {last}', text)}: ...\n```\n"
    yield _text(documented or function)


def _wrapped(name: str, signature: str) -> str:
    """Return a signature on one line, or with a parameter per line if it is long."""
    if len(name) + len(signature) <= 100:
        return name + signature
    inner, _, returned = signature.removeprefix("(").rpartition(")")
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(inner):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append(inner[start:at].strip())
            start = at + 1
    parts.append(inner[start:].strip())
    lines = "".join(f"    {part},\n" for part in parts)
    return f"{name}(\n{lines}){returned}"


def _record(kind: type) -> Iterator[str]:
    yield f"### `{kind.__name__}`\n"
    yield _text(kind)
    if issubclass(kind, Enum):
        yield f"Values: {', '.join(f'`{one.value}`' for one in kind)}.\n"
        fields = []
    else:
        about = _comments(kind)
        fields = [
            (one.name, str(one.type), about.get(one.name, ""))
            for one in dataclasses.fields(kind)  # type: ignore[arg-type]
        ]
    for name, one in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(one, property):
            returned = str(inspect.signature(one.fget).return_annotation)  # type: ignore[arg-type]
            fields.append((name, returned.strip("'"), ": " + " ".join(_text(one).split())))
        elif inspect.isfunction(one):
            fields.append((f"{name}()", "", ": " + " ".join(_text(one).split())))
    for name, annotation, text in fields:
        yield f"- `{name}`" + (f" (`{annotation}`)" if annotation else "") + text
    yield ""


def _comments(kind: type) -> dict[str, str]:
    """Return the comment before each field, or the docstring after it, as ": ...", by field."""
    found: dict[str, str] = {}
    comment: list[str] = []
    field = ""
    for line in map(str.strip, inspect.getsource(kind).splitlines()):
        if line.startswith("# "):
            comment.append(line.removeprefix("# "))
        elif match := re.match(r"(\w+): ", line):
            field = match[1]
            if comment:
                found[field] = f": {' '.join(comment)}"
            comment = []
        elif field and (text := re.fullmatch(r'"""(.*)"""', line)):
            found[field] = f": {text[1]}"
        elif line.startswith(("def ", "@")) and field:
            break
    return found


def _first(one: Any) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join(_text(one).split("\n\n")[0].split())


def _text(one: Any) -> str:
    """Return a docstring as Markdown."""
    text = inspect.getdoc(one) or ""
    assert text, f"{one} has no docstring"
    return text + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
