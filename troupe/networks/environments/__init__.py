"""Vectorised environments; `troupe.networks.vector.make_environment` makes them by name."""
