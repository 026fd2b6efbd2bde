"""All settings of a node, their defaults and their bounds."""
