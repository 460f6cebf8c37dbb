"""Planted faults: the catalogue, and the proof that each one is caught at the exact place where it did its damage."""
