"""The only package that knows vLLM: staging the production engine, its connector interface, version differences."""
