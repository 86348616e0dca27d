"""What runner, router and gRPC cost beside the engine: `python -m benchmarks.rollout`."""
