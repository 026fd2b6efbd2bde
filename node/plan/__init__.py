"""What settings cost over a link: every method and codec, one run, and advice."""
