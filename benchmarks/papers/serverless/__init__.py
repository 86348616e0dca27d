"""Reward functions that scale from zero and back."""
