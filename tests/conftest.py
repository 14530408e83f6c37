"""What the whole suite shares: the threads that services get."""

from __future__ import annotations

from forebay.cli.threads import settle_own_threads

settle_own_threads()  # here and not in a fixture: torch reads it once, when the first test file imports it
