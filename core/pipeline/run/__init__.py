"""What runs a schedule: stages, messages between ranks, the executor, and the loops that users write."""
