"""Fixtures of the chassis' tests."""

from echo_process import launch

__all__ = ["launch"]
