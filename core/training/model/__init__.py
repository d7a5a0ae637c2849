"""Which model a run trains: its settings, its facts, where its first weights come from."""
