"""Policy lag as a setting: which groups are generated when, and which are trained when."""
