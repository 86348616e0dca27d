"""A solver and a checker on the rows of a file: the project that `troupe init` writes."""
