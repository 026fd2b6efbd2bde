"""A stand-in for ``shoal`` as the launcher starts it: does what its first argument says, without
training.
"""

import os
import signal
import sys
import threading

from shoal.node.parallel import rank_process
from shoal.node.parallel.job import job_of
from shoal.swarm.errors import ShoalError

how = sys.argv[1]
job = job_of()


def work():
    sys.stderr.write(
        f"rank {job.rank} of {job.world}, start {job.restarts}\n"
    )  # in one piece, whatever the other rank writes
    sys.stderr.flush()
    if how == "mend":
        raise ShoalError("Mend it.")
    if how == "device":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if how == "bug":
        raise RuntimeError("oops")
    if how == "alone" and job.leads:
        return 6
    if (
        how in ("killed", "killed-once")
        and job.rank == 1
        and (how == "killed" or job.restarts == 0)
    ):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "signal":
        asked = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: asked.set())
        if job.leads:
            rank_process.begin_leading(job)
            print("ready", flush=True)
            asked.wait(60)
            print("asked", flush=True)
            return 130
        rank_process.begin_following()
    threading.Event().wait({"signal": 3, "killed": 600}.get(how, 0 if job.restarts else 600))
    sys.stdout.write("only rank 0 is heard\n" if job.leads else "?\n")
    sys.stdout.flush()
    return 0


if not job.leads and how == "killed-once":
    rank_process.begin_following()
rank_process.run_rank(job, work)
