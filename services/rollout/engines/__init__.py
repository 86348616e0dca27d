"""Engines that serve policies to the router: embedded (transformers), or inference servers."""
