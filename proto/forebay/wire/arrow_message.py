"""One Arrow IPC record-batch message whose schema both sides know: written plainly, read with suspicion.

The schema does not travel: a reader that takes it from the bytes would have to judge extension types (CVE-2023-47248),
unknown columns and metadata. Compression inside is refused before pyarrow looks at a body, because pyarrow expands
whatever it is told to (16.7 KB became 512 MiB, measured).
"""

from __future__ import annotations

import struct

import pyarrow as pa
import pyarrow.ipc

from forebay.wire.errors import WireError

_PREFIX_BYTES = 8  #: continuation marker and metadata length
# Field numbers of the flatbuffers tables in format/Message.fbs.
_MESSAGE_HEADER = 2
_MESSAGE_CUSTOM_METADATA = 4
_BATCH_COMPRESSION = 3


def write(batch: pa.RecordBatch) -> bytes:
    """The message that `read` takes."""
    content: bytes = batch.serialize().to_pybytes()
    return content


def read(content: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """The batch, every offset in it checked. Raises WireError."""
    try:
        message = pa.ipc.read_message(pa.py_buffer(content))
        _check_envelope(message, len(content))
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, ValueError, struct.error) as error:
        raise WireError(f"not a readable Arrow batch: {str(error).splitlines()[0]}") from error
    return batch


def _check_envelope(message: pa.ipc.Message, content_bytes: int) -> None:
    metadata = memoryview(message.metadata)
    if message.type != "record batch" or message.metadata_version != pa.ipc.MetadataVersion.V5:
        raise WireError(f"Arrow message is a {message.type} of metadata {message.metadata_version}")
    if _PREFIX_BYTES + len(metadata) + message.body.size != content_bytes:
        raise WireError("Arrow message is followed by other bytes")
    (root,) = struct.unpack_from("<I", metadata, 0)
    if _field(metadata, root, _MESSAGE_CUSTOM_METADATA):
        raise WireError("Arrow message carries metadata of its own")
    batch = _field(metadata, root, _MESSAGE_HEADER)
    (step,) = struct.unpack_from("<I", metadata, batch)
    if _field(metadata, batch + step, _BATCH_COMPRESSION):
        raise WireError("Arrow buffers are compressed inside; only the frame around them may be")


def _field(data: memoryview, table: int, number: int) -> int:
    """Position of a field of a flatbuffers table, 0 when it is not set. Raises struct.error outside `data`."""
    (back,) = struct.unpack_from("<i", data, table)
    vtable = table - back
    if not 0 <= vtable < len(data):
        raise WireError("Arrow message is malformed")
    (size,) = struct.unpack_from("<H", data, vtable)
    slot = 4 + 2 * number
    if slot + 2 > size:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + slot)
    return table + offset if offset else 0
