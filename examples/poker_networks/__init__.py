"""Small networks that learn poker against their own past."""
