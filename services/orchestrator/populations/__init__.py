"""Populations of a job: pools of frozen versions, matches between them, who meets whom next."""
