"""Small networks on vectorised environments: particles that spread, and a game for two."""
