"""Benchmark tasks on top of lm-eval: documents, prompts and scores."""
