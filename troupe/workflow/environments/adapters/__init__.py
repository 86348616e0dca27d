"""Adapters for game libraries. Each module imports its library on first use."""
