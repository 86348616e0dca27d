"""The command `troupe`."""
