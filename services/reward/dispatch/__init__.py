"""Invocations without an outcome: their queues, and the dispatcher that gives them to hosts."""
