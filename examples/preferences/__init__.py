"""Preferences (DPO), then reinforcement learning: pairs.py makes pairs for job.yaml."""
