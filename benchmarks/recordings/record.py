"""Keep a part of a run's experience: `python -m benchmarks.recordings.record RUN_FOLDER FILE.parquet [TRAJECTORIES]`.

Whole frames as the samplers sent them, spread evenly over the run. Rows of one frame have the same sampler,
incarnation and sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from forebay.buffer.records import Recovered, Scan, segment_path
from forebay.wire.experience import decode_frame, to_record_batch
from forebay.wire.v1 import experience_pb2


def recorded_frames(journal: Path) -> Iterator[experience_pb2.Frame]:
    """Every frame whose payload the journal still has (`--learner.keep_checkpoints 1000` keeps them all)."""
    for record in Scan(journal, repair=False):
        if record.event.HasField("appended") and record.intact and record.position.payload_bytes:
            yield experience_pb2.Frame(header=record.event.appended.header, payload=_payload(journal, record))


def _payload(journal: Path, record: Recovered) -> bytes:
    with segment_path(journal, record.position.segment).open("rb") as file:
        file.seek(record.position.payload_offset)
        return file.read(record.position.payload_bytes)


def spread(frames: list[experience_pb2.Frame], trajectories: int) -> list[experience_pb2.Frame]:
    """Frames at even distances, of about so many trajectories together."""
    members = sum(group.members for frame in frames for group in frame.header.groups)
    kept = max(1, round(len(frames) * min(1.0, trajectories / members)))
    return [frames[index * len(frames) // kept] for index in range(kept)]


def main() -> None:
    """Write the file and say what is in it."""
    folder, file, *rest = sys.argv[1:]
    frames = spread(list(recorded_frames(Path(folder) / "buffer" / "journal")), int(rest[0]) if rest else 500)
    table = pa.Table.from_batches([to_record_batch(decode_frame(frame), frame.header) for frame in frames])
    parquet.write_table(table, file, compression="zstd", compression_level=9)
    print(f"{file}: {len(frames)} frames, {table.num_rows} trajectories, {Path(file).stat().st_size} bytes")


if __name__ == "__main__":
    main()
