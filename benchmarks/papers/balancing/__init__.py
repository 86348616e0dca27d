"""The gain from balancing within and between policies; see docs/benchmarks/balancing.md."""
