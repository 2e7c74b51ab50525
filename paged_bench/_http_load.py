"""A lightweight load generator for the gateway, as client/paged_client/load.py is for gRPC.

It keeps connections open and records the time of each event, of which it parses only the length.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paged_client.load import ResponseTimes


def closed_loop(port: int, path: str, bodies: Sequence[Mapping[str, Any]], concurrency: int) -> list[ResponseTimes]:
    """POST every body with `concurrency` of them open at any time, and return their times.

    Raises RuntimeError if the status of a response is not 200.
    """
    return asyncio.run(_closed_loop(port, [_request(path, one) for one in bodies], concurrency))


def _request(path: str, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


async def _closed_loop(port: int, requests: Sequence[bytes], concurrency: int) -> list[ResponseTimes]:
    remaining = iter(requests)
    results = await asyncio.gather(*(_run_connection(port, remaining) for _ in range(min(concurrency, len(requests)))))
    return [times for result in results for times in result]


async def _run_connection(port: int, remaining: Iterator[bytes]) -> list[ResponseTimes]:
    """Send the next remaining request over a connection until there are none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return [await _send(request, reader, writer) for request in remaining]
    finally:
        writer.close()


async def _send(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> ResponseTimes:
    times = ResponseTimes(time.perf_counter())
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in head[:20]:
        raise RuntimeError(
            f"the gateway returned {head.splitlines()[0].decode()}: {(await reader.read(1000)).decode()}"
        )
    if b"transfer-encoding: chunked" in head:
        await _read_events(reader, times)
    else:
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
        times.stamps.append(time.perf_counter())
    return times


async def _read_events(reader: asyncio.StreamReader, times: ResponseTimes) -> None:
    """Read the events of a stream, each of which the gateway sends as a chunk. The end marker is not counted."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        event = await reader.readexactly(size + 2)
        if not event.startswith(b"data: [DONE]"):
            times.stamps.append(time.perf_counter())
    await reader.readexactly(2)
