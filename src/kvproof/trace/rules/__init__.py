"""The rules: pure functions over the records of ``kvproof.trace.records``; ``catalogue.RULES`` holds them all."""
