"""The rollout service: runs workflows, routes turns to engines, and keeps engines at their target
weights."""
