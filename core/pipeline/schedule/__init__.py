"""What a step does, as data: actions, orders, named schedules, and a player that times them. No torch, no process."""
