"""What happens to the requests: each mode is a list of scenarios, each a short story told to the harness."""
