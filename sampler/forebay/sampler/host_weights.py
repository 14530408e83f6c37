"""Two copies of the weights in shared memory: the one that serves, and the one that the next version is made in."""

from __future__ import annotations

import os
from collections.abc import Sequence

from forebay.sampler.engine import HostCopy
from forebay.wire.version import Version
from forebay.wire.weights import HostState, TensorSpec


class SharedState:
    """A HostState in a memfd, which the engine's workers open by its path."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._memory_fd = os.memfd_create("forebay-weights", os.MFD_CLOEXEC)
        self.state = HostState.allocate(specs, fd=self._memory_fd)

    def fits(self, specs: Sequence[TensorSpec]) -> bool:
        """Whether another state of these tensors could be copied in."""
        return self.state.specs == list(specs)

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
    """What serves stays whole until the engine has taken its successor: a failed update has something to go back to.

    Costs two copies of the published weights in host memory. All methods block: call them in a thread.
    """

    def __init__(self) -> None:
        self._serving: SharedState | None = None
        self._staging: SharedState | None = None

    @property
    def serving(self) -> SharedState:
        """The copy that the engine holds. Raises RuntimeError before the first `promote`."""
        if self._serving is None:
            raise RuntimeError("no weights yet")
        return self._serving

    def stage_copy(self) -> HostState:
        """A copy of what serves, to apply deltas to."""
        staged = self.stage_empty(self.serving.state.specs)
        staged.copy_from(self.serving.state)
        return staged

    def stage_empty(self, specs: Sequence[TensorSpec]) -> HostState:
        """Room for these tensors, to apply an anchor to."""
        ordered = sorted(specs, key=lambda spec: spec.name)
        if self._staging is None or not self._staging.fits(ordered):
            if self._staging is not None:
                self._staging.close()
            self._staging = SharedState(ordered)
        return self._staging.state

    def staged(self, version: Version) -> HostCopy:
        """What was staged, as the engine takes it."""
        if self._staging is None:
            raise RuntimeError("nothing is staged")
        return self._staging.as_copy(version)

    def promote(self) -> None:
        """The engine took what was staged: it serves now, and its predecessor's memory is the next staging area."""
        self._serving, self._staging = self._staging, self._serving

    def close(self) -> None:
        """Give both copies back."""
        for shared in (self._serving, self._staging):
            if shared is not None:
                shared.close()
        self._serving = self._staging = None
