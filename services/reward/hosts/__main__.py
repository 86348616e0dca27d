"""`python -m services.reward.hosts`: one more host for the reward service, as a process."""

from __future__ import annotations

if __name__ == "__main__":
    from services.chassis.app import run
    from services.reward.hosts.agent import RewardHost
    from services.reward.settings import RewardSettings

    raise SystemExit(run(RewardHost, RewardSettings))
