"""A slot batcher in a child process, which has an interpreter lock of its own."""
