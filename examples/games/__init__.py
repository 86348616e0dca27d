"""Games that agents learn by playing each other."""
