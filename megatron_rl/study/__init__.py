"""Studies: a grid of runs from one YAML file, resumable, and the table of what they found."""
