"""Runs of bench/table.py that nobody made."""


def a_run(
    method="diloco",
    inner="muon",
    codec="e3m0+ef",
    peers=4,
    every=50,
    steps=1000,
    seed=0,
    loss=2.0,
    **more,
):
    tokens = steps * 8 * 64 * 4 // peers
    params = 1000
    each = {"ddp": 4 * steps, "snoo": 0}.get(method, steps / every / 2)  # bytes of a parameter
    return {
        "text": "t",
        "model": "tiny",
        "method": method,
        "inner": inner,
        "codec": codec,
        "peers": peers,
        "every": every,
        "steps": steps,
        "lr": 0.02,
        "outer": {"lr": 0.7},
        "seed": seed,
        "loss": loss,
        "validation": loss,
        "params": params,
        "tokens": tokens,
        "bytes_per_param": each * every / steps,
        "curve": [[10, 7.0], [steps, loss]],
        "seconds": 1.0,
        **more,
    }


def ddp(inner, loss, seed=0, **more):
    return a_run("ddp", inner, "float32", every=1, loss=loss, seed=seed, **more)


def row_of(found, method, **fields):
    (row,) = [
        row
        for row in found
        if row["method"] == method and all(row[name] == value for name, value in fields.items())
    ]
    return row
