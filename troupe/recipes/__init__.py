"""Recipes: published results of multi-agent training, repeated with goals written down before."""
