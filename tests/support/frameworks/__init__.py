"""Agents of frameworks in separate environments: JSON in, JSON out."""
