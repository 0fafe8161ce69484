"""Trains the bundled model (`--model tiny`) and measures its answers."""
