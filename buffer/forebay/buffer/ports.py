"""Addresses that a service may listen on, and who holds one that is taken."""

from __future__ import annotations

import errno
import ipaddress
import socket
from pathlib import Path

from forebay.config.models import RunFile
from forebay.errors import UsageError

_LISTEN_STATE = "0A"


def check_listen(run: RunFile) -> None:
    """Raise UsageError for an address that must not, or cannot, be listened on."""
    for key, address in (("listen", run.buffer.listen), ("http", run.buffer.http)):
        check_address(f"buffer.{key}", address, insecure=run.security.insecure, such_as="127.0.0.1:7070")


def check_address(key: str, address: str, *, insecure: bool, such_as: str) -> None:
    """Raise UsageError, naming the key, for an address that must not, or cannot, be listened on."""
    host, port = split(address)
    if not insecure and not is_loopback(host):
        raise UsageError(
            f"{key}: got {address}, which others can reach without proof of who they are: expected a loopback address "
            f"such as {such_as}, or [security] insecure = true on a network you trust"
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


def split(address: str) -> tuple[str, int]:
    """Host, without the brackets of IPv6, and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def holder_of(port: int) -> str:
    """`pid 123 (python -m …)` of the process that listens on `port`; empty when it cannot be told."""
    inodes = _listening_inodes(port)
    for process in Path("/proc").glob("[0-9]*"):
        if any(_target(link) in inodes for link in _links(process / "fd")):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            return f"pid {process.name} ({command.strip()[:120]})"
    return ""


def _links(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # another user's process, or one that ended meanwhile
        return []


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            fields = line.split()
            if fields[3] == _LISTEN_STATE and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return inodes
