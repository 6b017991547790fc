"""Small generated tasks with worked solutions, and models fine-tuned to a target accuracy."""
