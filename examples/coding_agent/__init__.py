"""A team that writes code and is paid when real tests pass, in a sandbox."""
