"""Trainer service: workers that bind a policy, accumulate gradients, step, publish, commit."""
