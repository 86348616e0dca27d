"""Tests of troupe.workflow."""
