"""The command `troupe`."""

from troupe.client.cli.app import main

__all__ = ["main"]
