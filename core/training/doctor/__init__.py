"""What this machine can do and what it lacks: `python -m core.training.doctor [--json] [--device cpu]`."""
