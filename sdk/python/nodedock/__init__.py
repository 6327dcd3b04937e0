"""Nodedock drivers in Python: `sdk` has helpers for drivers, `testing` a fake host for their unit tests."""
