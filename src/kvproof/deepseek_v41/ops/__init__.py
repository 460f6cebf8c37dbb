"""The mechanisms of DeepSeek V4.1 as pure functions in plain torch, one file per section of the specification."""
