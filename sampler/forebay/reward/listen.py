"""Addresses that a reward service may listen on."""

from __future__ import annotations

import errno
import socket

from forebay.buffer.ports import holder_of, is_loopback, split
from forebay.errors import UsageError


def check_address(key: str, address: str, *, insecure: bool) -> None:
    """Raise UsageError, naming the key, for an address that must not, or cannot, be listened on."""
    host, port = split(address)
    if not insecure and not is_loopback(host):
        raise UsageError(
            f"{key}: got {address}, which others can reach without proof of who they are: expected a loopback address "
            "such as 127.0.0.1:7090, or [security] insecure = true on a network you trust"
        )
    try:
        _bind(host, port)
    except OSError as error:
        raise UsageError(f"{key}: cannot listen on {address}: {_why(error, port)}") from error


def is_here(address: str) -> bool:
    """Whether the address is one of this machine's."""
    try:
        _bind(split(address)[0], 0)
    except OSError:
        return False
    return True


def _bind(host: str, port: int) -> None:
    family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)


def _why(error: OSError, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = holder_of(port)
        return f"the port is in use{f' by {holder}' if holder else ''}: stop that, or choose another port"
    return f"{error.strerror or error}: choose another address"
