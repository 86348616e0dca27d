"""An agent whose framework has a separate Python environment: a child process, or a server."""
