"""What can be wrong with bytes from a wire or a file."""

from __future__ import annotations

from forebay.errors import ForebayError, UsageError


class WireError(ForebayError, ValueError):
    """Bytes that are not what they claim to be. Nothing of them was used."""


class FrameError(WireError):
    """A frame of experience that must not be stored or trained on."""


class WeightsError(ForebayError):
    """Weights that cannot be read, encoded or applied."""


class WrongBase(WeightsError):
    """A delta for other weights than these. The state is untouched: take another path to the version."""


class CorruptWeights(WeightsError, ValueError):
    """Weights, or a manifest, whose bytes are not what their digests and sizes say."""


class UnreadableCheckpoint(WeightsError, UsageError):
    """A checkpoint folder that is not there or whose files are not safetensors."""


class OtherModel(WeightsError, UsageError):
    """An adapter for another model than the one at hand."""
