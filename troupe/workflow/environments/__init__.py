"""Games and other environments that agents play through text."""
