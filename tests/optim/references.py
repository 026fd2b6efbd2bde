"""Float64 references of methods, which tests of several of them compare with."""

import numpy as np


def streaming(lab, peers, steps, *, every, slices, lag, mix, lr, momentum, merge=None):
    """Return {peer: (slow, fast) after each step}; every peer sees the same means."""
    slow, velocity = lab.start(), np.zeros(5)
    fast = {peer: lab.start() for peer in peers}
    under_way, path = {}, {peer: ([], []) for peer in peers}
    for step in range(1, steps + 1):
        for peer in peers:
            fast[peer] = fast[peer] - lab.RATE * lab.gradient(peer, fast[peer])
        for number, part in enumerate(slices):
            if step % every == (number + 1) * every // len(slices) % every:
                under_way[number] = (step, [slow[part] - fast[peer][part] for peer in peers])
            if number in under_way and under_way[number][0] == step - lag:
                before, sent = slow[part].copy(), under_way[number][1]
                mean = (merge or (lambda moved: np.mean(moved, axis=0)))(under_way.pop(number)[1])
                velocity[part] = momentum * velocity[part] + mean
                slow = slow.copy()
                slow[part] -= lr * (mean + momentum * velocity[part])
                for peer, own in zip(peers, sent, strict=True):
                    fast[peer] = fast[peer].copy()
                    if (
                        mix == "keep"
                        # recipes: move = (slow - slow before) - d, where d = fast - slow when it
                        # was sent
                    ):
                        fast[peer][part] += (slow[part] - before) + own
                        continue
                    fast[peer][part] = mix * fast[peer][part] + (1 - mix) * slow[part]
        for peer in peers:
            path[peer][0].append(slow)
            path[peer][1].append(fast[peer])
    return path
