"""Runs sweeps of policies over tasks on Ray and analyses their rows. Knows nothing of layers or prompts."""
