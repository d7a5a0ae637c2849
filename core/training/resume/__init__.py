"""A run that goes on: which rows come next, and what becomes of another optimizer's states."""
