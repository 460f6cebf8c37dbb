"""The random layouts of tests/layout are used here too."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parents[1] / "layout"))

# A loaded machine may stop any single example for longer than any deadline.
settings.register_profile("kvproof", deadline=None)
settings.load_profile("kvproof")
