"""The end of a killed process whose output nobody has taken."""

from __future__ import annotations

import asyncio
import sys

from troupe.user_code import close_output


async def test_the_end_of_a_process_is_seen_while_its_output_waits() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "while True: print('x' * 1000)", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        # asyncio does not read on before some of it is taken.
        while not process.stdout._paused:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    process.kill()
    close_output(process)
    async with asyncio.timeout(60):
        assert await process.wait() == -9
    close_output(process)
