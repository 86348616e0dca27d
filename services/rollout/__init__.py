"""Runs workflows, routes their turns to engines, keeps engines at the right weights."""
