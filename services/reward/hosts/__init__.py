"""Other hosts that run calls for a reward service: each attaches by a stream of its own."""
