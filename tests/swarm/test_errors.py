"""Sentences for the user, of which a stranger may have made parts."""

from shoal.swarm.errors import MessageError, printable


def test_no_sentence_drives_the_terminal():
    assert str(MessageError("It says \x1b[2J\u202e:\nno.")) == "It says ?[2J?:\nno."
    assert printable("a\nb\tc\x00", kept="\t", other=" ") == "a b\tc "
