"""Grammars that several tests use."""

SLOW = {"type": "integer", "multipleOf": 999_983}  # compiles for a minute
