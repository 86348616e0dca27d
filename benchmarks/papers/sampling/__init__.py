"""Environment steps per second of small networks, against RLlib and Sample Factory."""
