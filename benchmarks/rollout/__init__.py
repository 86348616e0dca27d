"""The cost of runner, router and gRPC in addition to the engine: `python -m benchmarks.rollout`."""
