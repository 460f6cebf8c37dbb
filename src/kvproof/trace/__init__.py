"""The runtime guard inside a running vLLM, and the reader of its logs."""
