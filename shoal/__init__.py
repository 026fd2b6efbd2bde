"""Train one model together over ordinary internet links: gossip with a random peer in place of an all-reduce.

    import shoal
    from shoal import NoLoCo

    with shoal.join("shoal://LINK", state=model) as session:     # or shoal.create(state=model), whose session.link others join by
        opt = NoLoCo(inner, session.exchange(), every=50)
        for batch in loader:
            model(batch).backward()
            opt.step()                                           # every 50th step also averages with a partner
            opt.zero_grad()

All public names are here; each is imported when it is first asked for, so ``import shoal`` alone is quick and loads no torch:

* `shoal.optim`: outer optimizers, codecs, schedules and exchanges, for a loop of one's own without a network;
* `create`, `join`, `Session`, `NetworkOptions`: a swarm in a loop of one's own;
* `Task`, `Shard`: a task for ``shoal up --hooks FILE:CLASS``.
"""
