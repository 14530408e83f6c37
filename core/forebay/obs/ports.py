"""Is a port free, and if not, whose is it?"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from forebay.errors import UsageError

LISTENING = "0A"


def split_address(address: str) -> tuple[str, int]:
    """`127.0.0.1:7070` or `[::1]:7070` as host and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def check_free(address: str, key: str) -> None:
    """Raises UsageError when `address`, which `key` of the run file set, cannot be listened on; names the holder."""
    host, port = split_address(address)
    try:
        # No address resolves to more than one family here that matters: a listener needs one.
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except (OSError, OverflowError) as error:
        raise UsageError(f"{key} = {address}: {_reason(error, port)}; set another address with {key}") from error


def holder(port: int) -> str | None:
    """Who listens on `port`, `python (pid 1234)`; None when nobody does or it may not be known."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        if inodes & _socket_inodes(process):
            return f"{_command(process)} (pid {process.name})"
    return None


def _reason(error: OSError | OverflowError, port: int) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        who = holder(port)
        return f"the port is in use by {who}" if who else "the port is in use"
    return (getattr(error, "strerror", None) or str(error)).lower()


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in (line.split() for line in rows):
            if row[3] == LISTENING and int(row[1].rpartition(":")[2], 16) == port:
                found.add(row[9])
    return found


def _socket_inodes(process: Path) -> set[str]:
    try:
        links = [os.readlink(entry) for entry in (process / "fd").iterdir()]
    except OSError:  # another user's, or gone
        return set()
    return {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "a process"
    return " ".join(word for word in words if word)[:80] or "a process"
