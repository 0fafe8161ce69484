"""Trains the bundled model (`--model tiny`) and evaluates it."""
