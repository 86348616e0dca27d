"""What balancing within and between policies is worth; see docs/benchmarks/balancing.md."""
