"""A small service that runs sandboxes for others, as a program: it shares nothing with its callers
but TCP connections, one for each sandbox. Standard library only.

Both sides send frames of one letter and a body. The caller sends `u` (path, NUL, content: upload),
`x` (words, separated by NUL: execute), `i` (input) and `k` (kill); the service sends `o` (output),
`e` (errors), `q` (how the command ended) and, after all of it, ends the connection. A sandbox ends
with its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

PYTHON = Path(sys.base_prefix)
BUBBLEWRAP = shutil.which("bwrap") or "bwrap"
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")


class RemoteSandbox:
    """The sandbox of one connection: a folder, and one command in bubblewrap that sees it as
    /tmp."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.folder = Path(tempfile.mkdtemp())
        self.process: asyncio.subprocess.Process | None = None
        self.tasks: list[asyncio.Task[None]] = []

    async def serve(self) -> None:
        try:
            while True:
                size = int.from_bytes(await self.reader.readexactly(4), "big")
                body = await self.reader.readexactly(size)
                await self.handle(body[:1], body[1:])
        except (EOFError, OSError):
            pass
        finally:
            if self.process is not None and self.process.returncode is None:
                self.process.kill()  # the first process dies with it, and all others with that
                await self.process.wait()
            self.writer.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    async def handle(self, what: bytes, body: bytes) -> None:
        if what == b"u":
            path, _, content = body.partition(b"\0")
            file = self.folder / path.decode()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        elif what == b"x":
            await self.execute([word.decode() for word in body.split(b"\0")])
        elif self.process is not None and what == b"i":
            assert self.process.stdin is not None
            with contextlib.suppress(OSError):
                self.process.stdin.write(body)
        elif self.process is not None and what == b"k" and self.process.returncode is None:
            self.process.kill()

    async def execute(self, command: list[str]) -> None:
        pipe = asyncio.subprocess.PIPE
        binds = [word for path in SYSTEM for word in ("--ro-bind-try", path, path)]
        self.process = await asyncio.create_subprocess_exec(
            *(BUBBLEWRAP, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"),
            *("--as-pid-1", "--die-with-parent", "--new-session", *binds),
            *("--ro-bind", str(PYTHON), str(PYTHON), "--proc", "/proc", "--dev", "/dev"),
            *("--bind", str(self.folder), "/tmp", "--chdir", "/tmp", *command),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env={"PATH": f"{PYTHON}/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        streams = ((b"o", self.process.stdout), (b"e", self.process.stderr))
        self.tasks = [asyncio.create_task(self.send(*stream)) for stream in streams]
        self.tasks.append(asyncio.create_task(self.tell_end()))

    async def send(self, what: bytes, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while part := await stream.read(1 << 16):
            self.frame(what + part)

    async def tell_end(self) -> None:
        assert self.process is not None
        await asyncio.gather(*self.tasks[:2])
        self.frame(b"q" + f"exited with status {await self.process.wait()}".encode())

    def frame(self, body: bytes) -> None:
        with contextlib.suppress(OSError):
            self.writer.write(len(body).to_bytes(4, "big") + body)


async def main() -> None:
    """Serve on a free port, which is printed, until standard input ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await RemoteSandbox(reader, writer).serve()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
