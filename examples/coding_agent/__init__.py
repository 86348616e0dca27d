"""A team that writes code and is rewarded if real tests in a sandbox pass."""
