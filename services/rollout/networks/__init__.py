"""Policies that are small networks, played in this process (docs/networks.md)."""
