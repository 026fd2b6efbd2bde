"""Pretraining on text in a custom training loop, with all peers that have the link.

    python examples/pretrain_text.py                          # the first: prints a link
    # everywhere else; downloads the first one's weights
    python examples/pretrain_text.py --link 'shoal://...'
    python examples/pretrain_text.py --data my/texts ...

A small GPT that reads bytes; without --data the text is the Python standard library. Every peer
reads the part of it that the fewest others read. The loop is an ordinary one; only the lines with
``session``, ``s`` and ``opt`` belong to the swarm.
"""

import argparse

import shoal
from shoal import RoundInfo, Shard
from shoal.node.tasks.text import TextTask

LISTEN = "/ip4/0.0.0.0/tcp/0"


def show(info: RoundInfo) -> None:
    """Print one line for each round."""
    print(f"round {info.key.round}: {max(len(info.members), 1)} peers", flush=True)


def main() -> None:
    """Train, and print the loss on held-out text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", help="of the swarm to join; without it a new one begins")
    parser.add_argument("--data", default="", help="files or folders of text")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--every", type=int, default=25, help="inner steps between two exchanges, of a new swarm"
    )
    parser.add_argument(
        "--peers", type=int, default=1, help="peers that a new swarm waits for before it begins"
    )
    parser.add_argument("--width", type=int, default=64, help="of the model; the same everywhere")
    parser.add_argument("--listen", default=LISTEN, help="where others reach this peer")
    chosen = parser.parse_args()

    text = TextTask(data=chosen.data, width=chosen.width)
    model = text.model()
    inner = shoal.muon(model)  # for the hidden matrices; AdamW for the rest
    network = shoal.NetworkOptions(listen=[chosen.listen])
    if chosen.link:
        session = shoal.join(chosen.link, state=model, network=network)
    else:
        session = shoal.create(
            state=model,
            every=chosen.every,
            start_when=chosen.peers,
            network=network,
            finish="average",
        )
        print(session.link, flush=True)
    with session as s:
        opt = s.optimizer(inner, on_round=show)
        batches = text.batches(Shard(s.shard.index, s.shard.of, s.seed))
        for step in range(chosen.steps):
            loss = text.loss(model, next(batches))
            loss.backward()  # type: ignore[no-untyped-call]
            opt.step()  # every so many steps also averages with a random peer
            opt.zero_grad()
            if step % 20 == 0:
                s.report(float(loss))  # for the others' status
    print(f"held-out loss: {text.evaluate(model):.4f} nats a byte", flush=True)


if __name__ == "__main__":
    main()
