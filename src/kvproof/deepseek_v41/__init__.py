"""DeepSeek V4.1 as a vLLM model that runs on any CPU.

One file per mechanism, each readable beside its section of the specification. Nothing here imports the rest of kvproof:
the model depends on torch, on vLLM's public extension points and on nothing else.
"""
