"""What the whole suite shares: the threads that services get, and patience on a busy machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from forebay.cli.threads import settle_own_threads

settle_own_threads()  # here and not in a fixture: torch reads it once, when the first test file imports it

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
