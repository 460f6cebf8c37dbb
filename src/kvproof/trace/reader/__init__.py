"""Reads the guard's logs: summary, explanation, timeline, SQL, live view. Pure: neither torch nor vLLM."""
