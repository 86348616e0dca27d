"""Reward functions that are there when they are called, and gone when they are not."""
