"""`python -m benchmarks.papers.actions`: actions scheduled one by one, beside reservations."""
