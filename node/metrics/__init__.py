"""Metrics of a run: a line of JSON for each event (`log`), and on request the same for other tools
(`sinks`, `prometheus`).
"""
