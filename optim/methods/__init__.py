"""Outer methods by name: their rules, schedules, codecs and settings."""
