"""Faults planted in vLLM's own objects while a real engine runs, to prove that the guard (kvproof.trace) sees them."""
