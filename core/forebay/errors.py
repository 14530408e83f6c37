"""The roots of forebay's errors, and the exit codes they stand for."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


class ForebayError(Exception):
    """Something failed at work. The message says what, where and what to do; the process exits with 1."""

    exit_code = EXIT_FAILED


class UsageError(ForebayError, ValueError):
    """The caller can mend it: a setting, a path, an address. One line; the process exits with 2."""

    exit_code = EXIT_USAGE
