"""Baselines of agents that share a policy: Dr. MAS (Feng et al. 2026) with a strict and a lenient
task."""
