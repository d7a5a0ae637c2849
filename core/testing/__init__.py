"""What tests and reports measure with."""

from core.testing.live import LiveBytes, live_bytes

__all__ = ["LiveBytes", "live_bytes"]
