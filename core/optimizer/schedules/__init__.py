"""Learning rates as functions of the step."""
