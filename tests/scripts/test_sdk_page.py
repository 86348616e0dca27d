"""docs/sdk.md is what `python -m scripts.sdk` writes, and leaves out nothing."""

from __future__ import annotations

import inspect

from scripts.sdk import HANDLES, PAGE, page, public
from troupe import client


def test_the_page_is_generated() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_the_page_names_every_public_method_and_class() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for kind in HANDLES:
        for name in public(kind):
            assert f"### `{kind.__name__}.{name}`" in text
    for name in client.__all__:
        assert f"`{name}`" in text or f"## {name}\n" in text, name


def test_blocking_and_asyncio_handles_have_the_same_methods() -> None:
    for kind, native in HANDLES.items():
        assert set(public(kind)) == set(public(native))
        for name in public(kind):
            own, other = (inspect.signature(getattr(one, name)) for one in (kind, native))
            assert list(own.parameters) == list(other.parameters), f"{kind.__name__}.{name}"
