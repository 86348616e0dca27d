"""What every section of the job specification shares."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticSerializationError, to_jsonable_python

_ENTRYPOINT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
COLUMN = r"^[A-Za-z_][A-Za-z0-9._-]{0,63}\Z"
NAME = r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$"


class Section(BaseModel):
    # An unknown field is nearly always a misspelt one: refuse it instead of ignoring it.
    # Infinity and NaN are no numbers of JSON, in which services pass the specification on.
    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False
    )


def check_entrypoint(value: str) -> str:
    if not _ENTRYPOINT.fullmatch(value):
        raise ValueError("must look like 'package.module:attribute'")
    return value


def check_json(value: Any) -> Any:
    try:
        json.dumps(to_jsonable_python(value), allow_nan=False)
    except (ValueError, PydanticSerializationError) as error:
        raise ValueError(f"must consist of JSON values: {error}") from error
    return value


def no_directory(source: str) -> bool:
    """Whether `source` can only be meant as a directory (no hub id looks like it), and is none."""
    meant = source.startswith((".", "/", "~")) or source.count("/") > 1
    path = Path(source).expanduser()
    return (meant or path.exists()) and not path.is_dir()


def expand_home(value: str | None) -> str | None:
    # Whoever writes "~" means his own home, not the services'.
    return os.path.expanduser(value) if value is not None and value.startswith("~") else value
