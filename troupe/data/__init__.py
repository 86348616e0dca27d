"""Rows of data sets: loaded, checked, in a reproducible order. `datasets` is imported on demand."""
