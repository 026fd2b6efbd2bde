"""A node that cheats: `python cheat.py KIND up|join ...`, the rest as for `python -m shoal`.

quantised   generates with weights of 4 bits, and claims that the policy it hands out did
copier      does not check: takes another verifier's commitment, and later its vote, for its own
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

from shoal.node.cli import main as cli  # noqa: E402
from shoal.node.verify import claimer  # noqa: E402
from shoal.verification.consensus.records import Commitment, Reveal  # noqa: E402
from shoal.verification.consensus.voter import Voter  # noqa: E402
from tests.support.quantised_policy import quantised  # noqa: E402


def cheat_by_quantising():
    prove = claimer.prove
    claimer.prove = lambda policy, *arguments, **named: prove(
        quantised(policy), *arguments, **named
    )


def cheat_by_copying():
    copied = {}

    def others(member, kind, case, attempt):
        found = [
            record
            for record in member.consensus.ledger
            if isinstance(record, kind) and record.peer != member.peer
        ]
        return [record for record in found if (record.case, record.attempt) == (case, attempt)]

    def work(member, most=1):
        for duty in member.consensus.duties(member.peer):
            key = (duty.case, duty.attempt)
            if duty.what == "check" and key not in copied:
                for seen in others(member, Commitment, *key)[:1]:
                    copied[key] = seen.peer
                    member.try_publish(
                        Commitment(
                            peer=member.peer,
                            case=seen.case,
                            attempt=seen.attempt,
                            digest=seen.digest,
                        )
                    )
            elif duty.what == "reveal" and key in copied:
                for seen in (r for r in others(member, Reveal, *key) if r.peer == copied[key]):
                    member.try_publish(Reveal(**{**seen.model_dump(), "peer": member.peer}))
        member._publish_due()
        return 0

    Voter.work = work


if __name__ == "__main__":
    {"quantised": cheat_by_quantising, "copier": cheat_by_copying}[sys.argv.pop(1)]()
    cli.main()
