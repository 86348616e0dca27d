"""Sandboxes that outlive a call: files and processes of one trajectory stay between its actions.

A function with `stateful: true` runs in the sandbox of the call's trajectory; functions that
declare the same sandbox, image and limits share it. Its working directory is `/tmp/work`, which is
private, writable and empty at first. A call is a child of a supervisor inside: its timeout ends the
call and what is left of its process group, and nothing else; what it put into another session goes
on in the background, with the cores of the calls that run, and stands still between them.
"""
