"""Streams of tensorrtllm_backend clients to a real server."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import tritonclient.grpc as grpcclient

from tests.support.waiting import WAIT

WIRE = {f"TYPE_{kind}": kind for kind in ("INT32", "INT64", "UINT64", "UINT8", "FP16", "FP32", "BOOL")}


TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")


TYPES = {
    "seed": np.uint64, "random_seed": np.uint64, "lora_task_id": np.uint64, "top_p": np.float32,
    "temperature": np.float32, "length_penalty": np.float32, "repetition_penalty": np.float32,
    "presence_penalty": np.float32, "frequency_penalty": np.float32, "embedding_bias_weights": np.float32,
    "runtime_top_p": np.float32, "len_penalty": np.float32, "embedding_bias": np.float32,
}  # fmt: skip


def inputs(client=grpcclient, **values):
    """Return input tensors from lists of rows, with the types that tensorrtllm_backend's clients use."""
    made = []
    for name, rows in values.items():
        tensor = np.array(rows, dtype=TYPES.get(name))
        if tensor.dtype.kind == "U":
            tensor = np.char.encode(tensor, "utf-8").astype(object)
        elif tensor.dtype.kind == "S":
            tensor = tensor.astype(object)
        elif tensor.dtype.kind == "i":
            tensor = tensor.astype(np.int32)
        elif tensor.dtype == np.float64:
            tensor = tensor.astype(np.float32)
        kind = {"O": "BYTES", "b": "BOOL", "i": "INT32", "u": "UINT64", "f": "FP32"}[tensor.dtype.kind]
        made.append(client.InferInput(name, list(tensor.shape), kind))
        made[-1].set_data_from_numpy(tensor)
    return made


@dataclass
class Stream:
    """A gRPC stream to one of the models."""

    client: grpcclient.InferenceServerClient
    model: str
    responses: queue.Queue = field(default_factory=queue.Queue)

    def send(self, request_id="", **values):
        self.client.async_stream_infer(
            self.model, inputs(**values), request_id=request_id, enable_empty_final_response=True
        )

    def next(self):
        """Return (outputs, whether the response is final), or raise the error."""
        result, error = self.responses.get(timeout=WAIT)
        if error is not None:
            raise error
        message = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in message.outputs}
        return outputs, message.parameters["triton_final_response"].bool_param

    def all(self):
        parts, final = [], False
        while not final:
            outputs, final = self.next()
            parts.append(outputs)
        return parts

    def cancel(self):
        self.client.stop_stream(cancel_requests=True)


@contextmanager
def opened(server, model="tensorrt_llm_bls") -> Iterator[Stream]:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        stream = Stream(client, model)
        client.start_stream(lambda result, error: stream.responses.put((result, error)))
        try:
            yield stream
        except BaseException:
            stream.cancel()  # its requests may never end
            raise


ASKED = {"text_input": [["The sea"]], "max_tokens": [[32]], "end_id": [[-1]], "stream": [[True]]}
