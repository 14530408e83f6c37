"""One `forebay run` a run folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.config.home import MARKER
from forebay.errors import UsageError


@contextmanager
def claimed(home: Path) -> Iterator[None]:
    """Hold a prepared run folder's marker; a killed holder lets go. Raises UsageError when another process holds it."""
    with (home / MARKER).open("a+") as marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            marker.seek(0)
            who = marker.read().strip() or "unknown"
            raise UsageError(
                f"run folder {home}: forebay run (pid {who}) works there; stop it, or give this one another run.name"
            ) from error
        marker.truncate(0)
        marker.write(f"{os.getpid()}\n")
        marker.flush()
        yield
