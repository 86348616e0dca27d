"""Agents of frameworks that are installed in environments of their own: JSON in, JSON out."""
