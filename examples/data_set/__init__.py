"""A data set of one's own, without a line of code: rows of a file, a ready workflow and reward."""
