"""The speed of transfers of state: `python -m benchmarks.transfer`."""
