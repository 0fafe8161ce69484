"""Runs sweeps of policies over tasks on Ray, stores their rows and analyses them."""
