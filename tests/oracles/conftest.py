"""Hypothesis without deadlines."""

from __future__ import annotations

from hypothesis import settings

# A loaded machine may stop any single example for longer than any deadline.
settings.register_profile("kvproof", deadline=None)
settings.load_profile("kvproof")
