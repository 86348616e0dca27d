"""Supervised steps, then reinforcement learning: rows.py makes demonstrations for job.yaml."""
