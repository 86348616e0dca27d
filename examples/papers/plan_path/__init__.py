"""Tree sampling for teams: AT-GRPO (Zhao et al. 2025) on Plan-Path, a maze of 5 x 5 cells."""
