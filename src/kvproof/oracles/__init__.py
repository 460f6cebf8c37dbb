"""Each oracle is a pure function of (layout, transcript) -> (result, findings). Imports neither torch nor vLLM."""
