"""One Hypothesis profile for all tests."""

from __future__ import annotations

from hypothesis import settings

# A loaded machine may stop any single example for longer than any deadline; failing examples print their own seed.
settings.register_profile("kvproof", deadline=None, print_blob=True)
settings.load_profile("kvproof")
