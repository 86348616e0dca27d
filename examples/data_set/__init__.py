"""Your own data set, without a line of code: rows of a file, a ready workflow and reward."""
