"""The rollout service: runs workflows, routes turns to engines, keeps these at target weights."""
