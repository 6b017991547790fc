"""Reinforcement-learning post-training of language models with Megatron-core and vLLM."""

__version__ = "0.1.0"  # the one place: setup.py reads it here
