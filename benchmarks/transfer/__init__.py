"""How fast state moves: `python -m benchmarks.transfer`."""
