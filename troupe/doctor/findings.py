"""Findings of a check of a host: a verdict, a sentence, and a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a finding is to be taken."""

    GOOD = "good"
    NOTE = "note"
    """Works, but slower or with less than the host could give; or is not used here."""
    PROBLEM = "problem"
    """Jobs that need it fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    subject: str
    """The thing checked: "torch", "shared memory"."""
    verdict: Verdict
    text: str
    remedy: str = ""
    """The remedy; empty if none is needed."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}" + (f". {self.remedy}" if self.remedy else "")


def good(subject: str, text: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(subject, Verdict.GOOD, text)


def note(subject: str, text: str, remedy: str = "") -> Finding:
    """Return a finding that costs speed or room, or that matters to some jobs only."""
    return Finding(subject, Verdict.NOTE, text, remedy)


def problem(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding that makes jobs fail."""
    return Finding(subject, Verdict.PROBLEM, text, remedy)
