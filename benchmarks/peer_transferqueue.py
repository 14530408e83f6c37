"""TransferQueue under the buffer's load: `PEER_PYTHON -m benchmarks.peer_transferqueue --seconds S [--thorough]`, in
TransferQueue's own environment (`benchmarks/peer_transferqueue.txt`).

Its controller and storage units are processes of a local Ray, the clients are one or two processes more; everything is
kept in memory, as its default storage does. A row is one sample with one field. Each figure is the best of several ways
to use it, all of them when `--thorough`. Rows in are counted when a put has returned, rows out when the tensors are
there. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from benchmarks.buffer_load.commands import LoadFailed, LoadProcess, ask_all, obey, span_s

MODULE = "benchmarks.peer_transferqueue"
KB, MB = 1 << 10, 1 << 20
RAY_CPUS = 8  #: with two, its actors never start
_FILL_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to use the peer: by which of its interfaces, from how many processes, calls of how many bytes at once."""

    by: str
    processes: int
    calls: int
    call_bytes: int


#: The first is tried always: the fastest found on two cores.
PUTS = (
    Way(by="put", processes=1, calls=4, call_bytes=4 * MB),
    Way(by="put", processes=1, calls=4, call_bytes=16 * MB),
    Way(by="put", processes=2, calls=2, call_bytes=4 * MB),
    Way(by="put", processes=1, calls=4, call_bytes=MB),
    Way(by="kv_batch_put", processes=1, calls=4, call_bytes=MB),
    Way(by="kv_batch_put", processes=1, calls=1, call_bytes=64 * KB),
)
GETS = (
    Way(by="get_data", processes=1, calls=4, call_bytes=MB),
    Way(by="get_data", processes=1, calls=1, call_bytes=MB),
    Way(by="get_data", processes=1, calls=4, call_bytes=8 * MB),
)


class ServerRole:
    """The process that starts Ray, the controller and the storage units, and owns them."""

    async def start(self) -> dict[str, Any]:
        """Start them; where clients connect to."""
        ray: Any = import_module("ray")
        queue: Any = import_module("transfer_queue")
        started = ray.init(num_cpus=RAY_CPUS, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        queue.init()
        return {"address": started.address_info["address"]}

    async def stop(self) -> dict[str, Any]:
        """End all that was started."""
        import_module("ray").shutdown()
        return {}


class ClientRole:
    """A process that puts and gets."""

    def __init__(self) -> None:
        self._torch: Any = import_module("torch")
        self._queue: Any = import_module("transfer_queue")
        self._rows: Any = import_module("tensordict").TensorDict
        self._names = (f"{os.getpid()}-{number}" for number in itertools.count())
        self._client: Any = None

    async def connect(self, address: str) -> dict[str, Any]:
        """Become a client of what the server started."""
        ray: Any = import_module("ray")
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        self._queue.init()
        self._client = self._queue.get_client()
        return {}

    async def put(self, by: str, row_bytes: int, rows_a_call: int, calls: int, seconds: float) -> dict[str, Any]:
        """Put rows for that long, several calls at once."""
        data = self._torch.randint(0, 256, (rows_a_call, row_bytes), dtype=self._torch.uint8)
        fields = self._rows({"x": data}, batch_size=rows_a_call)
        put = {"put": self._put, "kv_batch_put": self._kv_batch_put}[by]
        began = time.monotonic()

        async def keep_putting() -> int:
            rows = 0
            while time.monotonic() < began + seconds:
                await put(fields, rows_a_call)
                rows += rows_a_call
            return rows

        rows = sum(await asyncio.gather(*(keep_putting() for _ in range(calls))))
        return {"began_s": began, "ended_s": time.monotonic(), "rows": rows}

    async def get(self, by: str, row_bytes: int, rows_a_call: int, calls: int, seconds: float) -> dict[str, Any]:
        """Put rows for a while; then fetch them as a consumer does, and count those."""
        partition = next(self._names)
        data = self._torch.randint(0, 256, (rows_a_call, row_bytes), dtype=self._torch.uint8)
        fields, filled = self._rows({"x": data}, batch_size=rows_a_call), 0
        until = time.monotonic() + seconds * _FILL_SHARE
        while time.monotonic() < until or not filled:
            await self._client.async_put(fields, partition_id=partition)
            filled += 1
        began, left = time.monotonic(), iter(range(filled))

        async def keep_getting() -> int:
            rows = 0
            for _ in left:
                meta = await self._client.async_get_meta(
                    data_fields=["x"], batch_size=rows_a_call, partition_id=partition, task_name="learner"
                )
                rows += len((await self._client.async_get_data(meta))["x"].unbind())
            return rows

        rows = sum(await asyncio.gather(*(keep_getting() for _ in range(calls))))
        return {"began_s": began, "ended_s": time.monotonic(), "rows": rows, "by": by}

    async def _put(self, fields: Any, rows: int) -> None:
        """The native interface; a partition a call, since it wants each filled at once."""
        await self._client.async_put(fields, partition_id=next(self._names))

    async def _kv_batch_put(self, fields: Any, rows: int) -> None:
        """The keyed interface."""
        keys = [next(self._names) for _ in range(rows)]
        await self._queue.async_kv_batch_put(keys=keys, partition_id="keyed", fields=fields)


def measure(seconds: float, thorough: bool) -> dict[str, Any]:
    """All figures; rates of the best ways, and which they were."""
    puts, gets = (PUTS, GETS) if thorough else (PUTS[:1], GETS[:1])
    count = max(way.processes for way in (*puts, *gets))
    with ExitStack() as stack:
        server = stack.enter_context(LoadProcess(MODULE, "--role=server"))
        clients = [stack.enter_context(LoadProcess(MODULE, "--role=client")) for _ in range(count)]
        address = server.ask("start")["address"]
        stack.callback(server.ask, "stop")
        ask_all(clients, "connect", address=address)

        def rates(do: str, ways: Sequence[Way], row_bytes: int) -> dict[str, float]:
            return {
                f"{way.by}, {way.processes} processes, {way.calls} calls of {way.call_bytes // KB} KiB at once": _rate(
                    clients, do, way, row_bytes, seconds
                )
                for way in ways
            }

        put_1k, get_1k = rates("put", puts, KB), rates("get", gets, KB)
        return {
            "transferqueue_append_1k_rows_s": round(max(put_1k.values())),
            "transferqueue_append_1k_by_way": put_1k,
            "transferqueue_append_64k_mb_s": round(max(rates("put", puts, 64 * KB).values()) * 64 * KB / 1e6, 1),
            "transferqueue_get_1k_rows_s": round(max(get_1k.values())),
            "transferqueue_get_1k_by_way": get_1k,
            "transferqueue_get_1m_mb_s": round(max(rates("get", gets, MB).values()) * MB / 1e6, 1),
        }


def _rate(clients: Sequence[LoadProcess], do: str, way: Way, row_bytes: int, seconds: float) -> float:
    answers = ask_all(
        clients[: way.processes],
        do,
        by=way.by,
        row_bytes=row_bytes,
        rows_a_call=max(1, way.call_bytes // row_bytes),
        calls=way.calls,
        seconds=seconds,
    )
    rows: int = sum(answer["rows"] for answer in answers)
    return round(rows / span_s(answers), 1)


async def play(role: str) -> None:
    """Be one of the processes."""
    if role == "server":
        server = ServerRole()
        await obey({"start": server.start, "stop": server.stop})
    else:
        client = ClientRole()
        await obey({"connect": client.connect, "put": client.put, "get": client.get})


def main(argv: Sequence[str]) -> int:
    """Measure, or play one role of the measurement."""
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: its storage would get no core beside its client
    # Ray guards a local cluster with a token, which by itself it would leave in the home folder.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each kind of load")
    parser.add_argument("--thorough", action="store_true", help="try every way, not only the one that won before")
    parser.add_argument("--role", choices=("server", "client"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.role:
        asyncio.run(play(arguments.role))
        return 0
    try:
        print(json.dumps(measure(arguments.seconds, arguments.thorough)))
    except LoadFailed as error:
        print(json.dumps({"error": str(error)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
