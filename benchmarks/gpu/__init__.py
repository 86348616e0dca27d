"""Measurements that need a GPU, in one command; on a CPU they use a tiny model."""
