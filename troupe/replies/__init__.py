"""Replies of models: `reading` finds thoughts, tool calls, JSON and code blocks; `formats` lists
how families of models write them."""
