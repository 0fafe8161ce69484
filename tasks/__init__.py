"""Turns benchmark documents into prompts and answers into scores. Knows nothing of Ray."""
