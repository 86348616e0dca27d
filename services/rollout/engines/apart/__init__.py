"""An embedded engine's model in a process of its own, with an interpreter lock of its own."""
