"""A peer's script in a test of the exchanges: a list of steps, played by every kind of exchange, in
any process.

["start", NAME, {"round": 0, "fragment": 0, "values": [...], "weight": 1, "codec": "float32",
"spoil": false}] ["done", NAME]                     notes whether that exchange is over
["result", NAME, DEADLINE]         notes its outcome: null, or {"values", "weight", "members"}
["mark", WHAT], ["after", WHAT]    "after" waits until a peer has reached the "mark"
["die"]                            at once, as by kill -9
"""

import torch

from shoal.optim import RoundKey, codec_named
from shoal.optim.exchange.base import Contribution


def play(exchange, run, steps, mark, after, die):
    """Play the steps; return the notes, in order."""
    handles, notes = {}, []
    for what, *arguments in steps:
        if what == "start":
            name, options = arguments
            values = torch.tensor(options["values"], dtype=torch.float32)
            key = RoundKey(run, options.get("round", 0), options.get("fragment", 0))
            codec = codec_named(options.get("codec", "float32"))
            handles[name] = exchange.start(
                Contribution(key, [values, values[:1].clone()], options.get("weight", 1.0), codec)
            )
            if options.get("spoil"):
                values.fill_(99.0)
        elif what == "result":
            name, *deadline = arguments
            notes.append(outcome(handles[name].result(*deadline)))
        elif what == "done":
            notes.append(handles[arguments[0]].done())
        else:
            {"mark": mark, "after": after, "die": die}[what](*arguments)
    return notes


def outcome(mean):
    if mean is None:
        return None
    assert all(tensor.dtype == torch.float32 for tensor in mean.tensors)
    assert torch.allclose(mean.tensors[0][:1], mean.tensors[1], rtol=1e-6, atol=0)
    return {
        "values": mean.tensors[0].tolist(),
        "weight": mean.weight,
        "members": list(mean.members),
    }
