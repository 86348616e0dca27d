"""Turns routed to the devices that suit them; see docs/benchmarks/rollout.md."""
