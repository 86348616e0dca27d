"""Role-conditioned baselines in self-play: SPIRAL's RAE (Liu et al. 2025) on Kuhn poker."""
