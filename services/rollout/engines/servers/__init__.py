"""Engines that are inference servers: the interface to servers, and what all kinds share."""
