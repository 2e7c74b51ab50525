"""A lean load generator for the gateway: keeps connections open and stamps each event of an answer, of which it reads
no more than where it ends. What client/load.py is for gRPC."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from client.load import ResponseTimes


def closed_loop(port: int, path: str, bodies: Sequence[Mapping[str, Any]], concurrency: int) -> list[ResponseTimes]:
    """POST every body, `concurrency` of them open at any time, each over a connection of its own that stays open.
    Raises RuntimeError where an answer is not 200."""
    return asyncio.run(_closed_loop(port, [_request(path, one) for one in bodies], concurrency))


def _request(path: str, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


async def _closed_loop(port: int, requests: Sequence[bytes], concurrency: int) -> list[ResponseTimes]:
    left = iter(requests)
    found = await asyncio.gather(*(_ask_in_turn(port, left) for _ in range(min(concurrency, len(requests)))))
    return [answer for answers in found for answer in answers]


async def _ask_in_turn(port: int, left: Iterator[bytes]) -> list[ResponseTimes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return [await _ask(request, reader, writer) for request in left]
    finally:
        writer.close()


async def _ask(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> ResponseTimes:
    answer = ResponseTimes(time.perf_counter())
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in head[:20]:
        raise RuntimeError(f"the gateway answers {head.splitlines()[0].decode()}: {(await reader.read(1000)).decode()}")
    if b"transfer-encoding: chunked" in head:
        await _read_events(reader, answer)
    else:
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
        answer.stamps.append(time.perf_counter())
    return answer


async def _read_events(reader: asyncio.StreamReader, answer: ResponseTimes) -> None:
    """The gateway sends each as a chunk. The last one, which says that there are no more, is not stamped."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        event = await reader.readexactly(size + 2)
        if not event.startswith(b"data: [DONE]"):
            answer.stamps.append(time.perf_counter())
    await reader.readexactly(2)
