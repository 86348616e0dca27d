"""Variables that a client cannot use are named, and no secret is shown."""

from __future__ import annotations

import pytest

from troupe.rpc import ClientSettings, InvalidArgument


@pytest.mark.parametrize(
    ("variable", "value", "field", "shown"),
    [
        ("TROUPE_DEADLINE_SECONDS", "abc", "TROUPE_DEADLINE_SECONDS", "abc"),
        ("TROUPE_MAX_MESSAGE_MIB", "0", "TROUPE_MAX_MESSAGE_MIB", "0"),
        ("TROUPE_RETRY", "{", "TROUPE_*", None),
        # A value that a header cannot carry would fail every call, like a bug of Troupe.
        ("TROUPE_TOKEN", " secret", "TROUPE_TOKEN", None),
        ("TROUPE_TOKEN", "secret\n", "TROUPE_TOKEN", None),
        ("TROUPE_TOKEN", "sécret", "TROUPE_TOKEN", None),
    ],
)
def test_a_variable_that_is_not_as_it_must_be_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, field: str, shown: str | None
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidArgument) as caught:
        ClientSettings.of_environment()
    assert (caught.value.field, caught.value.value) == (field, shown)
    assert "cret" not in str(caught.value)
    assert caught.value.remedy


def test_settings_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_TOKEN", "se cret.0~")
    monkeypatch.setenv("TROUPE_DEADLINE_SECONDS", "7")
    settings = ClientSettings.of_environment()
    assert settings.token is not None
    assert settings.token.get_secret_value() == "se cret.0~"
    assert settings.deadline_seconds == 7
