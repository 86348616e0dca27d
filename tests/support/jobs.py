"""Job specifications as tests write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


def job_text(spec: dict[str, Any], changes: Mapping[str, Any]) -> str:
    """The YAML of `spec` with fields replaced or added by name: "section.field", or with "__"."""
    spec = yaml.safe_load(yaml.safe_dump(spec))
    for name, value in changes.items():
        *path, last = name.replace("__", ".").split(".")
        section = spec
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return yaml.safe_dump(spec)
