"""An agent whose framework lives in another environment: a child process, or a server."""
