"""Training of policies that are small networks (docs/networks.md)."""
