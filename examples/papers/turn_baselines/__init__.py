"""Baselines per turn index: why centring bonuses per turn teaches agents to stop (verl#7244)."""
