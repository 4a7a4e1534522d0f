"""API keys that name sessions. A key is shown once, when it is issued; what is kept cannot be turned back into it."""

from __future__ import annotations

import hashlib
import hmac
import secrets

_PREFIX = "sk-"  # some SDKs refuse keys that look otherwise


class KeyRing:
    """Issues keys and tells whose they are.

    Keys are looked up by a digest under a secret of this ring: how long a look-up takes says nothing about any key,
    because nobody outside can know digests. Digests are compared in constant time.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._owners: dict[bytes, str] = {}
        self._digests: dict[str, bytes] = {}

    def issue(self, owner: str) -> str:
        """A new key for ``owner``, which has none yet."""
        key = _PREFIX + secrets.token_urlsafe(32)
        digest = self._digest(key)
        self._owners[digest] = owner
        self._digests[owner] = digest
        return key

    def owner(self, key: str) -> str | None:
        """Whose key this is; None for a key that was never issued or is revoked."""
        digest = self._digest(key)
        owner = self._owners.get(digest)
        known = digest if owner is None else self._digests[owner]
        return owner if hmac.compare_digest(digest, known) else None

    def revoke(self, owner: str) -> None:
        """Forgets the key of ``owner``."""
        del self._owners[self._digests.pop(owner)]

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), key=self._secret, digest_size=32).digest()
