"""Connects servers to NVIDIA Dynamo (https://github.com/ai-dynamo/dynamo): workers, and a local frontend."""
