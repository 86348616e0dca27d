"""A team on one engine: see `__main__`."""
