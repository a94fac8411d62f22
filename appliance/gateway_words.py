"""Words that the gateway says to whoever started it."""

from __future__ import annotations

ADDRESSES_KEY = "X_ATHANOR_ADDRESSES"
"""Line of the ready notification that tells where the appliance listens, as JSON."""
