"""Which rank writes and reads what: functions of integers, and the messages between ranks."""
