"""Learning curves of small networks against published plateaus: `python -m benchmarks.networks`."""
