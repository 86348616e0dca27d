"""`python -m troupe.client.cli`."""

from troupe.client.cli.app import main

if __name__ == "__main__":
    raise SystemExit(main())
