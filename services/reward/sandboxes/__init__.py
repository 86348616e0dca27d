"""Sandboxes of functions: confinement of code, and sandboxes that outlive a call.

The working directory of a stateful sandbox is `/tmp/work`, private, writable and empty at first. A
call is a child of a supervisor inside. Between two calls only the supervisor and files remain:
every process that a call started, in whatever session, is ended before its answer is sent.
"""
