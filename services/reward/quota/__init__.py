"""Quotas of interfaces outside: how much calls may use them, over all services together."""
