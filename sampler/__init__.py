"""Exact block-diffusion decoding and scoring under a layer-reuse policy. Knows torch; never Ray, lm-eval or Arrow."""
