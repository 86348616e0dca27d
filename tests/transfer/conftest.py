"""Another host's states, and their servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from tests.support.waiting import PATIENCE
from troupe.rpc import ClientSettings
from troupe.rpc.retry import RetryPolicy
from troupe.transfer import Transfer
from troupe.transfer.remote import Peer, TransferOwner

TOKEN = SecretStr("secret")
SETTINGS = ClientSettings(token=TOKEN, retry=RetryPolicy(max_attempts=1))


@pytest.fixture
def there(tmp_path: Path) -> Transfer:
    """What the other host stores."""
    return Transfer(tmp_path / "there")


@pytest.fixture
def owner(there: Transfer) -> Iterator[TransferOwner]:
    owner = TransferOwner(there, token=TOKEN, use_ucx=False)
    yield owner
    owner.stop(0)


@pytest.fixture
def here(tmp_path: Path, owner: TransferOwner) -> Iterator[Transfer]:
    """What this host stores; it knows the other one."""
    source = Peer(owner.address, SETTINGS, deadline_seconds=PATIENCE)
    yield Transfer(tmp_path / "here", peers=[source])
    source.close()
