"""The trainer's update against TRL's, each in a separate process."""
