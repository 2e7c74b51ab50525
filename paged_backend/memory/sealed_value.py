"""Authenticates the values of a store that others can write to, with HMAC-SHA256 and a secret that servers share.

    value = authentication code (32 bytes), data        the code covers the key and the data

Without a secret a value is the data alone.
"""

from __future__ import annotations

import hashlib
import hmac

from paged_backend.api.secrets import MIN_KEY_BYTES

CODE_BYTES = hashlib.sha256().digest_size


class ForgedValue(Exception):
    """A value was not written by a server with the same secret, or was changed since."""


class Seal:
    """Seals data under a key, and opens it again."""

    def __init__(self, secret: bytes | None):
        """secret: shared by all servers that read each other's values, at least MIN_KEY_BYTES; None: values are not
        authenticated."""
        assert secret is None or len(secret) >= MIN_KEY_BYTES
        self._secret = secret

    @property
    def name(self) -> str:
        """A name of the secret, which servers with another secret do not have. It does not reveal the secret."""
        if self._secret is None:
            return "unauthenticated"
        return hmac.digest(self._secret, b"name of the secret", "sha256")[:8].hex()

    @property
    def extra_bytes(self) -> int:
        """How much longer a value is than its data."""
        return 0 if self._secret is None else CODE_BYTES

    def close(self, key: bytes, data: bytes) -> bytes:
        """Return the value of data that is stored under a key."""
        return data if self._secret is None else self._code(self._secret, key, data) + data

    def open(self, key: bytes, value: bytes) -> bytes:
        """Return the data of a value that was read from a key. Raises ForgedValue."""
        if self._secret is None:
            return value
        data = value[CODE_BYTES:]
        if not hmac.compare_digest(value[:CODE_BYTES], self._code(self._secret, key, data)):
            raise ForgedValue("its authentication code is wrong")
        return data

    @staticmethod
    def _code(secret: bytes, key: bytes, data: bytes) -> bytes:
        code = hmac.new(secret, len(key).to_bytes(8, "little"), "sha256")
        code.update(key)
        code.update(data)
        return code.digest()
