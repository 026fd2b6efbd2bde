"""Publish and subscribe: signed records, with large bodies fetched from their author."""
