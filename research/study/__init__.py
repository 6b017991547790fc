"""Studies: resumable grids of runs from one YAML file, and tables of their results."""
