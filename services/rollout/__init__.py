"""The rollout service: runs workflows, routes their turns to engines, keeps engines at the target
weights."""
