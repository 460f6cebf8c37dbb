"""kvproof."""
