"""Small networks on vectorised environments: spreading particles, and a game for two agents."""
