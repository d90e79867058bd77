"""The way to a server, as a program that can be killed in the middle of a request while the server keeps what it has.

It prints the port at which it listens (the one that is given, or any for 0) and hands on what comes from there to the
second port, until its standard input ends, or until as many bytes have gone to the server as the third argument says.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys

#: Bytes that may still go to the server.
_left = float(sys.argv[3]) if len(sys.argv) > 3 else math.inf


async def _hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool) -> None:
    global _left
    try:
        while data := await reader.read(2**14):
            _left -= len(data) if counts else 0
            if _left < 0:
                os._exit(1)
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # one side is gone, and learns nothing by it
    finally:
        writer.close()


async def _serve(port: int, to: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", to)
        await asyncio.gather(_hand_on(reader, back, counts=True), _hand_on(there, writer, counts=False))

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await asyncio.to_thread(sys.stdin.read)
    sys.stdout.flush()
    os._exit(0)  # with connections open


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
