"""Engines that serve policies to the router: embedded (transformers) and SGLang."""
