"""Environment steps per second of small networks, beside RLlib and Sample Factory."""
