"""Schedules of sending and applying fragments, and lengths of rounds."""
