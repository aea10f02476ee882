"""How long one phase of an exchange takes: each rank sends one message to every other member of its group, and gets one.

To the sibling core: sibling_latency_s + bytes / sibling_bytes_per_s, as published. Otherwise

    exchange_latency_s + hypot(cost of the messages, bytes to other chips / exchange_bytes_per_s)

but not less than one message alone: link_latency_s + bytes / link_bytes_per_s, as published. Each message costs something, each
byte too, and the two overlap in part: small exchanges go by the number of their messages, large ones by their bytes. Three
constants, fitted on the seven published exchanges with 7 peers; the seven published ones in stages of 1 and 3 peers were not used
(docs/validation.md has the errors). The first 7 messages cost exchange_message_s each. Nothing is published beyond 7 peers or
beyond a host: what a further message costs, exchange_further_message_s, is an assumption.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import hypot

from mkgen.errors import MkgenError
from mkgen.targets import Target

HOST, CORE = "host", "core"              # mesh factors: ranks of other hosts; the cores of one chip
FACTORS = (HOST, "chip", CORE)
PUBLISHED = 7                            # peers of the largest exchange that anybody has published a time of


@dataclass(frozen=True)
class Phase:
    """Seconds: `links` is how long the core's links are taken, `latency` comes on top, and keeps nobody else waiting."""
    latency: float
    links: float

    @property
    def seconds(self) -> float:
        return self.latency + self.links


def phase(target: Target, peers: int, message_bytes: int, *, factors: tuple[str, ...] = (), latency: float = 1.0,
          host_latency: float = 1.0) -> Phase:
    """One phase with `peers` messages of `message_bytes` out and in.

    factors: the mesh factors in which its ranks differ; none: all peers are on other chips of the host.
    latency scales the latencies, not the cost of messages and bytes; host_latency does so where ranks are on several hosts."""
    unknown = [f for f in factors if f not in FACTORS]
    if unknown:
        raise MkgenError(f"an exchange over {unknown[0]!r}: mesh factors are {', '.join(FACTORS)}")
    if peers == 0:
        return Phase(0.0, 0.0)
    if tuple(factors) == (CORE,):
        return Phase(target.sibling_latency_s * latency, peers * message_bytes / target.sibling_bytes_per_s)
    constant = latency * (host_latency if HOST in factors else 1.0)
    remote = max(1, peers - (target.cores_per_chip - 1)) if CORE in factors else peers
    messages = min(peers, PUBLISHED) * target.exchange_message_s + max(0, peers - PUBLISHED) * target.exchange_further_message_s
    links = hypot(messages, remote * message_bytes / target.exchange_bytes_per_s)
    alone = target.link_latency_s * constant + message_bytes / target.link_bytes_per_s
    return Phase(max(target.exchange_latency_s * constant, alone - links), links)


def phase_seconds(target: Target, peers: int, message_bytes: int, latency: float = 1.0, factors: tuple[str, ...] = (),
                  host_latency: float = 1.0) -> float:
    """`phase`, in seconds from the sends to the last message, when nothing else is on the links."""
    return phase(target, peers, message_bytes, factors=factors, latency=latency, host_latency=host_latency).seconds
