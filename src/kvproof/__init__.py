"""kvproof: proves that an LLM server's KV cache is right."""

__version__ = "0.1.0"
