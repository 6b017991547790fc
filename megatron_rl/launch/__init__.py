"""Starting runs elsewhere: NeMo-Run, locally or on SLURM, and what became of them.

`nemo.py` alone imports nemo_run, which lives in an environment of its own; the job needs none.
"""
