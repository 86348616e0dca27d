"""`python -m benchmarks.papers.actions`: actions scheduled one by one, against reservations."""
