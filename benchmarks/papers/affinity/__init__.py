"""Turns that go to the devices that fit them; see docs/benchmarks/rollout.md."""
