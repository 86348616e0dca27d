"""Another host's states, and who gives them out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from troupe.transfer import Transfer
from troupe.transfer.remote import Owner

TOKEN = SecretStr("secret")


@pytest.fixture
def there(tmp_path: Path) -> Transfer:
    """What the other host stores."""
    return Transfer(tmp_path / "there")


@pytest.fixture
def owner(there: Transfer) -> Iterator[Owner]:
    owner = Owner(there, token=TOKEN, use_ucx=False)
    yield owner
    owner.stop(0)
