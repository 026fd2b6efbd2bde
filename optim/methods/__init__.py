"""Outer methods by name: what each one is made of and which settings it has."""
