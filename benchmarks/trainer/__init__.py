"""The trainer's update against TRL's, each in a process of its own."""
