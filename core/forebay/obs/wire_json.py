"""Messages of the wire as plain data, for `--json`."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.message import Message

from forebay.wire.v1 import common_pb2
from forebay.wire.version import Version


def plain(message: Message) -> dict[str, Any]:
    """Every field, unset ones too: numbers as numbers, digests in hexadecimal, versions as `1.12`, enums by name."""
    return dict(_field(message, field) for field in message.DESCRIPTOR.fields)


# A field's descriptor is the pure Python or the C class: they share no type.


def _field(message: Message, field: Any) -> tuple[str, Any]:
    value = getattr(message, field.name)
    if field.name.endswith("_json"):
        return field.name.removesuffix("_json"), json.loads(value) if value else None
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return field.name, dict(value)
    if field.is_repeated:
        return field.name, [_value(item, field) for item in value]
    if field.message_type is not None and not message.HasField(field.name):
        return field.name, None
    return field.name, _value(value, field)


def _value(value: Any, field: Any) -> Any:
    match value:
        case common_pb2.Version():
            return str(Version.from_proto(value))
        case Message():
            return plain(value)
        case bytes():
            return value.hex()
    return field.enum_type.values_by_number[value].name if field.enum_type is not None else value
