"""From a reply to the answer in it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from forebay.errors import UsageError


class AnswerExtractor:
    """Cuts a reply at the stop texts and takes the last match of the answer pattern."""

    def __init__(self, pattern: str | None, stop: Sequence[str] = ()) -> None:
        """Raises UsageError when `pattern` is not a regular expression."""
        self._stop = tuple(stop)
        try:
            self._pattern = re.compile(pattern) if pattern is not None else None
        except re.error as error:
            raise UsageError(f"task.answer_pattern is {pattern!r}: not a regular expression ({error})") from error

    def __call__(self, reply: str) -> str:
        """The answer; empty when the reply has none, which is the policy's fault and scored as such."""
        for stop in self._stop:
            reply = reply.split(stop, 1)[0]
        if self._pattern is None:
            return reply.strip()
        matches = list(self._pattern.finditer(reply))
        if not matches:
            return ""
        found = matches[-1]
        return (found.group(1 if self._pattern.groups else 0) or "").strip()
