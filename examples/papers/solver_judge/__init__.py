"""A pretrained solver and judge: an adapter per role, one for both, or a solver alone."""
