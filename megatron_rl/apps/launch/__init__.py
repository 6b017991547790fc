"""Launching runs with NeMo-Run, in the background or on SLURM, and monitoring them.

Only `nemo.py` imports nemo_run, which has its own environment; jobs do not need it.
"""
