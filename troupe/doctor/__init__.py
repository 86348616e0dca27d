"""Checks of one host: whether it has what a cluster needs, and what to do where it does not."""
