"""What `shoal watch --json` has printed."""

import json


def heard(watcher, kind="status"):
    return [event for event in map(json.loads, list(watcher.lines)) if event["event"] == kind]
