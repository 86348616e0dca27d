"""Environments made of other libraries' games. Each module imports its library when it is used."""
