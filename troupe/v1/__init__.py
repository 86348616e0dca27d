"""Generated from `protos/troupe/v1` by `make protos`; never edited by hand."""
