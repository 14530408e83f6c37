"""The buffer's own fixture: a served buffer a test."""

from __future__ import annotations

from tests.buffer.conftest import serve

__all__ = ["serve"]
