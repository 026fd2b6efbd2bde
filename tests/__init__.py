"""The tests: a package, so that one called `tests` which some library installs does not take its
place.
"""
