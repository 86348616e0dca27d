"""`python -m services.reward`: the reward service as a process."""

from __future__ import annotations

if __name__ == "__main__":
    from services.chassis.app import run
    from services.reward.server import RewardService, RewardSettings

    raise SystemExit(run(RewardService, RewardSettings))
