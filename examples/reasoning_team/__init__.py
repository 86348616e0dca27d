"""A solver and a checker, two policies of different size, on four reasoning_gym datasets."""
