"""What both ends of a reward model's calls go by: sizes, and the options of their connections."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its core logs every GOAWAY to stderr; ours says what matters

#: Completions in one call at most, and bytes of one call: what a caller can make the service hold is bounded by them.
MAX_COMPLETIONS = 512
MAX_REQUEST_BYTES = 1 << 20
#: The full name of the gRPC service, which health checks ask for.
SERVICE = "forebay.wire.v1.Reward"

_SHARED_OPTIONS: list[tuple[str, Any]] = [("grpc.max_metadata_size", 8 << 10)]
SERVER_OPTIONS = [
    *_SHARED_OPTIONS,
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
CLIENT_OPTIONS = [
    *_SHARED_OPTIONS,
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
