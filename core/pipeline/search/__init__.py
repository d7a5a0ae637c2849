"""Schedules that are found: a search over orders, for costs that were measured. No torch, no process."""
