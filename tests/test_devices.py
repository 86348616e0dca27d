"""How people write the devices of a machine."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.devices import GIB, Device, parse_devices
from troupe.rpc import InvalidArgument


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GB", [("gpu", 80 * GIB)]),
        ("2x24GB", [("gpu", 24 * GIB)] * 2),
        ("8xH100-80GB", [("H100", 80 * GIB)] * 8),
        ("A100-SXM4-40GiB", [("A100-SXM4", 40 * GIB)]),
        ("cpu-512MB", [("cpu", GIB // 2)]),
        ("1xRTX-4090-23.5gb + 2xL4-24GB", [("RTX-4090", 47 * GIB // 2)] + [("L4", 24 * GIB)] * 2),
    ],
)
def test_devices_are_read_from_text(text: str, expected: list[tuple[str, int]]) -> None:
    """Count, class and memory; count and class may be left out; kinds are joined by +."""
    assert parse_devices(text) == tuple(
        Device(index, name, memory) for index, (name, memory) in enumerate(expected)
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "8xH100",
        "H100",
        "0xH100-80GB",
        "8xH100-0GB",
        "8xH100-80",
        "80GB+",
        "65537x1GB",
        "-1x80GB",
        "8x-80GB",
        "80GB,24GB",
        "8 x H100-80GB",
        "²x80GB",
        "40000x1GB+40000x1GB",
    ],
)
def test_a_text_that_is_no_list_of_devices_is_refused(text: str) -> None:
    """The error names the field, the whole text and what to write instead."""
    with pytest.raises(InvalidArgument) as refused:
        parse_devices(text, "TROUPE_DEVICES")
    assert refused.value.field == "TROUPE_DEVICES"
    assert refused.value.value == text
    assert refused.value.remedy


@given(st.text(max_size=40))
def test_no_text_breaks_the_reader(text: str) -> None:
    """Any text gives devices or the typed error."""
    with contextlib.suppress(InvalidArgument):
        assert parse_devices(text)
