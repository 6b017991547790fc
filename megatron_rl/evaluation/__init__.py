"""Scores of sampled responses to held-out problems: Avg@k, pass@k, maj@k, and their intervals."""
