"""What balancing within a policy and between policies is worth; see docs/benchmarks.md."""
