"""A gateway with OpenAI's HTTP interface, before a server that serves one model."""
