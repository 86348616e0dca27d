"""`python -m benchmarks.actions`: actions scheduled one by one, beside reservations."""
