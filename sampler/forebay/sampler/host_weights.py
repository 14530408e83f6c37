"""The sampler's one copy of the weights, in shared memory: the next version is made in place, and can be unmade."""

from __future__ import annotations

import os
from collections.abc import Sequence

from forebay.sampler.engine import HostCopy
from forebay.wire.manifest import spec_of
from forebay.wire.v1 import weights_pb2
from forebay.wire.version import Version
from forebay.wire.weights import HostState, TensorSpec, Undo, apply


class SharedState:
    """A HostState in a memfd, which the engine's workers open by its path."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._memory_fd = os.memfd_create("forebay-weights", os.MFD_CLOEXEC)
        self.state = HostState.allocate(specs, fd=self._memory_fd)

    def as_copy(self, version: Version) -> HostCopy:
        """What the engine is pointed at. Raises CorruptWeights when the state is damaged."""
        return HostCopy(
            path=f"/proc/{os.getpid()}/fd/{self._memory_fd}",
            nbytes=self.state.nbytes,
            layout=[dict(slot) for slot in self.state.layout],
            version=version,
            digest=self.state.digest(),
        )

    def close(self) -> None:
        """Give the memory back once nobody maps it any more."""
        os.close(self._memory_fd)


class HostWeights:
    """What serves, changed in place to what will serve next.

    The engine reads these bytes only while it installs them, so nobody sees the change. What was applied is taken back
    when an update or its installation fails (`put_back`) and forgotten only once the engine has it (`keep`); until
    then the payloads on the way are held, and after an anchor a second copy. All methods block: call them in a thread.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._shared = SharedState(specs)
        self._replaced: SharedState | None = None  #: what serves, while an anchor of other tensors is tried
        self._undos: list[Undo] = []

    @property
    def state(self) -> HostState:
        """The weights as they are now."""
        return self._shared.state

    @property
    def is_changed(self) -> bool:
        """Whether there is a way back."""
        return bool(self._undos) or self._replaced is not None

    def as_copy(self, version: Version) -> HostCopy:
        """The weights as they are now, for the engine. Raises CorruptWeights when they are damaged."""
        return self._shared.as_copy(version)

    def apply(self, manifest: weights_pb2.Manifest, payload: bytes) -> None:
        """One more update. Raises WrongBase or CorruptWeights; the weights are then as they were before it."""
        specs = sorted((spec_of(entry) for entry in manifest.tensors), key=lambda spec: spec.name)
        if manifest.anchor and specs != self.state.specs:
            self.put_back()
            self._replaced, self._shared = self._shared, SharedState(specs)
        self._undos.append(apply(self.state, manifest, payload, keep_undo=True))

    def recheck(self) -> list[str]:
        """Names of tensors that went bad in memory; what is applied next must then be an anchor. Reads all of it."""
        rotten = self.state.recheck()
        if rotten:
            self.state.mark_damaged(f"{rotten[0]} went bad in memory")
        return rotten

    def keep(self) -> None:
        """The engine has taken the weights: there is no way back any more."""
        self._undos.clear()
        if self._replaced is not None:
            self._replaced.close()
            self._replaced = None

    def put_back(self) -> None:
        """Make the weights again what they were at the last `keep`."""
        if self._replaced is not None:
            self._undos.clear()
            self._shared.close()
            self._shared, self._replaced = self._replaced, None
        while self._undos:
            self._undos.pop().roll_back()

    def close(self) -> None:
        """Give the memory back."""
        self.put_back()
        self._shared.close()
