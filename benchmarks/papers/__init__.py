"""Benchmarks that reproduce published figures of FlexMARL, RollArt, ARL-Tangram and MALib."""
