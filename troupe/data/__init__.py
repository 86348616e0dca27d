"""Rows of data sets, loaded, checked and in a reproducible order. `datasets` is imported on
demand."""
