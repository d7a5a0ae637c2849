"""Schedules as text, SVG and torch's CSV."""
