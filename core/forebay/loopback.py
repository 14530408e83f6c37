"""Addresses of this machine that only it can reach."""

from __future__ import annotations

import socket


def free_addresses(count: int) -> list[str]:
    """`host:port` that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses
