"""Slow, obvious reference implementations that the tests compare the sampler with."""
