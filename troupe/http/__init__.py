"""Bounds on what clients of an HTTP server may take: bodies in memory, and open connections."""
