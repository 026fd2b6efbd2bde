"""Methods that are experiments: in the table of methods like all others, listed below them."""
