"""One log line format for every service."""

from __future__ import annotations

import logging
import sys
import time


def setup_logging(service: str, level: str = "info") -> None:
    """Log to standard error as `12:34:56 sampler-0 INFO message`; libraries only from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(f"%(asctime)s {service} %(levelname)s %(message)s", "%H:%M:%S")
    formatter.converter = time.localtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("forebay").setLevel(level.upper())
