"""Verdicts, findings, evidence and reports. Pure: imports neither torch nor vLLM."""
