"""Runs as a process of its own: sends requests to a Dynamo worker as the frontend does, and prints the results as JSON.

The requests come from standard input. One with `stop_after` is stopped after that number of chunks.
"""

import asyncio
import json
import sys

from dynamo._core import Context, DistributedRuntime


async def call(client, request):
    """Return the chunks of the answer and the error at its end."""
    context, chunks = Context(), []
    limit = request.pop("stop_after", None)
    try:
        async for answer in await client.round_robin(request, context=context):
            chunks.append(answer.data())
            if len(chunks) == limit:
                context.stop_generating()
    except Exception as error:
        return chunks, f"{type(error).__name__}: {error}"
    return chunks, None


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    client = await runtime.endpoint("dynamo.backend.generate").client()
    await client.wait_for_instances()
    print(json.dumps([await call(client, request) for request in json.load(sys.stdin)]), flush=True)
    runtime.shutdown()


asyncio.run(main())
