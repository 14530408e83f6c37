"""Reverb under the buffer's load: `PEER_PYTHON -m benchmarks.peer_reverb --seconds S [--thorough]`, in Reverb's own
environment (`benchmarks/peer_reverb.txt`).

A server process, one or two client processes, everything in memory: Reverb's tables are volatile. An item is one row,
as it is one trajectory that can be sampled by itself; items of a whole group are told apart. Each figure is the best of
several ways to use Reverb, all of them when `--thorough`. Rows in are counted when the server has confirmed them, rows
out when Python holds them. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from benchmarks.buffer_load.commands import LoadFailed, LoadProcess, ask_all, obey, span_s

MODULE = "benchmarks.peer_reverb"
KB, MB = 1 << 10, 1 << 20
GROUP_SIZE = 8
#: Row bytes and rows an item of each table.
TABLES = ((KB, 1), (KB, GROUP_SIZE), (64 * KB, 1), (MB, 1))
_TABLE_BYTES = 1 << 30
_ROWS_A_LOOK = 64  #: between looks at the clock
_BATCH_BYTES = MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to use the peer: by which of its interfaces, from how many processes, how much on the way at once."""

    by: str
    processes: int
    in_flight: int


#: The first is tried always: the fastest found on two cores.
INSERTS = (
    Way(by="structured_writer", processes=1, in_flight=200),
    Way(by="structured_writer", processes=2, in_flight=200),
    Way(by="trajectory_writer", processes=1, in_flight=200),
    Way(by="writer", processes=1, in_flight=200),
    Way(by="writer", processes=2, in_flight=200),
)
SAMPLES = (
    Way(by="timestep_dataset", processes=1, in_flight=512),
    Way(by="timestep_dataset", processes=1, in_flight=64),
    Way(by="timestep_dataset", processes=2, in_flight=64),
    Way(by="client", processes=1, in_flight=1),
)


def table_of(row_bytes: int, rows_an_item: int) -> str:
    """Its name."""
    return f"{row_bytes}x{rows_an_item}"


class ServerRole:
    """The process that holds the tables."""

    def __init__(self) -> None:
        reverb: Any = import_module("reverb")
        self._server = reverb.Server(
            tables=[
                reverb.Table(
                    table_of(row_bytes, rows),
                    sampler=reverb.selectors.Uniform(),
                    remover=reverb.selectors.Fifo(),
                    max_size=_TABLE_BYTES // (row_bytes * rows),
                    rate_limiter=reverb.rate_limiters.MinSize(1),
                )
                for row_bytes, rows in TABLES
            ],
            port=None,
        )

    async def port(self) -> dict[str, Any]:
        """Where it listens."""
        return {"port": self._server.port}


class ClientRole:
    """A process that inserts and samples."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._reverb: Any = import_module("reverb")
        self._client = self._reverb.Client(address)

    async def insert(
        self, by: str, row_bytes: int, rows_an_item: int, in_flight: int, seconds: float
    ) -> dict[str, Any]:
        """Insert items for that long, then wait until the server has confirmed all."""
        import numpy as np

        pool = np.random.default_rng(0).integers(0, 256, (_ROWS_A_LOOK, rows_an_item, row_bytes), dtype=np.uint8)
        write = {
            "structured_writer": self._structured,
            "trajectory_writer": self._trajectory,
            "writer": self._legacy,
        }[by]
        began = time.monotonic()
        items = write(table_of(row_bytes, rows_an_item), lambda: _until(began + seconds, pool), in_flight)
        ended = time.monotonic()
        return {"began_s": began, "ended_s": ended, "rows": items * rows_an_item}

    async def sample(
        self, by: str, row_bytes: int, rows_an_item: int, in_flight: int, seconds: float
    ) -> dict[str, Any]:
        """Sample rows for that long."""
        read = {"timestep_dataset": self._dataset, "client": self._samples}[by]
        batches = read(row_bytes, rows_an_item, in_flight)
        next(batches)  # the first one makes the graph
        began, items = time.monotonic(), 0
        while time.monotonic() < began + seconds:
            items += next(batches)
        ended = time.monotonic()
        return {"began_s": began, "ended_s": ended, "rows": items * rows_an_item}

    def _structured(self, table: str, items: Callable[[], Iterator[Any]], in_flight: int) -> int:
        structured = self._reverb.structured_writer
        pattern = structured.pattern_from_transform({"x": None}, lambda step: {"x": step["x"][-1:]})
        writer = self._client.structured_writer([structured.create_config(pattern, table=table)])
        count = 0
        for count, item in enumerate(items(), start=1):  # the last count is what was written
            writer.append({"x": item})
            if count % _ROWS_A_LOOK == 0:
                writer.flush(in_flight)
        writer.flush()
        return count

    def _trajectory(self, table: str, items: Callable[[], Iterator[Any]], in_flight: int) -> int:
        count = 0
        with self._client.trajectory_writer(num_keep_alive_refs=1, validate_items=False) as writer:
            for count, item in enumerate(items(), start=1):
                writer.append({"x": item})
                writer.create_item(table, 1.0, {"x": writer.history["x"][-1:]})
                if count % _ROWS_A_LOOK == 0:
                    writer.flush(in_flight)
            writer.flush()
        return count

    def _legacy(self, table: str, items: Callable[[], Iterator[Any]], in_flight: int) -> int:
        count = 0
        with self._client.writer(max_sequence_length=1, chunk_length=1, max_in_flight_items=in_flight) as writer:
            for count, item in enumerate(items(), start=1):  # noqa: B007
                writer.append({"x": item})
                writer.create_item(table, 1, 1.0)
            writer.flush()
        return count

    def _dataset(self, row_bytes: int, rows_an_item: int, in_flight: int) -> Iterator[int]:
        tf: Any = import_module("tensorflow")
        dataset = self._reverb.TimestepDataset(
            server_address=self._address,
            table=table_of(row_bytes, rows_an_item),
            dtypes={"x": tf.uint8},
            shapes={"x": tf.TensorShape([rows_an_item, row_bytes])},
            max_in_flight_samples_per_worker=in_flight,
        )
        items = max(1, _BATCH_BYTES // (row_bytes * rows_an_item))
        for batch in dataset.batch(items).prefetch(2).as_numpy_iterator():
            yield len(batch.data["x"])

    def _samples(self, row_bytes: int, rows_an_item: int, in_flight: int) -> Iterator[int]:
        for _ in self._client.sample(table_of(row_bytes, rows_an_item), 1 << 30, emit_timesteps=False):
            yield in_flight


def _until(deadline: float, pool: Any) -> Iterator[Any]:
    while time.monotonic() < deadline:
        yield from pool


def measure(seconds: float, thorough: bool) -> dict[str, Any]:
    """All figures; rates of the best ways, and which they were."""
    with ExitStack() as stack:
        server = stack.enter_context(LoadProcess(MODULE, "--role=server"))
        address = f"127.0.0.1:{server.ask('port')['port']}"
        clients = [stack.enter_context(LoadProcess(MODULE, "--role=client", f"--address={address}")) for _ in range(2)]
        inserts, samples = (INSERTS, SAMPLES) if thorough else (INSERTS[:2], SAMPLES[:1])

        def best(do: str, ways: Sequence[Way], row_bytes: int, rows_an_item: int = 1) -> tuple[float, dict[str, float]]:
            found = {
                f"{way.by}, {way.processes} processes, {way.in_flight} in flight": _rate(
                    clients, do, way, row_bytes, rows_an_item, seconds
                )
                for way in ways
            }
            return max(found.values()), found

        append_1k, by_way = best("insert", inserts, KB)
        figures: dict[str, Any] = {
            "reverb_append_1k_rows_s": round(append_1k),
            "reverb_append_1k_by_way": by_way,
            "reverb_append_1k_group_items_rows_s": round(best("insert", inserts, KB, GROUP_SIZE)[0]),
            "reverb_append_64k_mb_s": round(best("insert", inserts, 64 * KB)[0] * 64 * KB / 1e6, 1),
        }
        best("insert", inserts[:1], MB)
        sample_1k, by_way = best("sample", samples, KB)
        return figures | {
            "reverb_sample_1k_rows_s": round(sample_1k),
            "reverb_sample_1k_by_way": by_way,
            "reverb_sample_1k_group_items_rows_s": round(best("sample", samples, KB, GROUP_SIZE)[0]),
            "reverb_sample_1m_mb_s": round(best("sample", samples, MB)[0] * MB / 1e6, 1),
        }


def _rate(
    clients: Sequence[LoadProcess], do: str, way: Way, row_bytes: int, rows_an_item: int, seconds: float
) -> float:
    answers = ask_all(
        clients[: way.processes],
        do,
        by=way.by,
        row_bytes=row_bytes,
        rows_an_item=rows_an_item,
        in_flight=way.in_flight,
        seconds=seconds,
    )
    rows: int = sum(answer["rows"] for answer in answers)
    return round(rows / span_s(answers), 1)


async def play(role: str, address: str) -> None:
    """Be one of the processes."""
    if role == "server":
        server = ServerRole()
        await obey({"port": server.port})
    else:
        client = ClientRole(address)
        await obey({"insert": client.insert, "sample": client.sample})


def main(argv: Sequence[str]) -> int:
    """Measure, or play one role of the measurement."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each kind of load")
    parser.add_argument("--thorough", action="store_true", help="try every way, not only those that won before")
    parser.add_argument("--role", choices=("server", "client"), help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.role:
        asyncio.run(play(arguments.role, arguments.address))
        return 0
    try:
        print(json.dumps(measure(arguments.seconds, arguments.thorough)))
    except LoadFailed as error:
        print(json.dumps({"error": str(error)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
