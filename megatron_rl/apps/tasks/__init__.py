"""The task of the quickstart, and what fine-tunes small models for it."""
