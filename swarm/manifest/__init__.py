"""The signed manifest and the settings in it. Imports no torch."""
