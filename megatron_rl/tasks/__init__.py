"""Small generated tasks whose answers are traces, and models that solve a wished share of them."""
