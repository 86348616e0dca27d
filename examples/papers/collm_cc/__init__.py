"""One critic for a team: CoLLM-CC (Liu et al. 2026) in a relay of two agents."""
