"""A solver and a checker, two policies of different size, on three kinds of puzzles."""
