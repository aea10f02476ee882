"""How long one phase of an exchange takes: each rank sends one message to every other member of its group, and gets one.

seconds = max(collective_phase_s, collective_base_s + bytes a rank sends / rate): a hinge fitted on published collectives of 8
cores, whose slope is the rate of all links of a core together. The time to issue many messages is in the kernel's cycles.
"""
from __future__ import annotations

from mkgen.targets import Target

FITTED_PEERS = 7                         # the hinge's slope is given by message of an exchange with so many peers


def phase_seconds(target: Target, peers: int, message_bytes: int, latency: float = 1.0) -> float:
    """One phase with `peers` messages of `message_bytes` out and in; `latency` scales its constant part (other hosts)."""
    if peers == 0:
        return 0.0
    sent = target.collective_per_byte_s / FITTED_PEERS * peers * message_bytes
    return max(target.collective_phase_s * latency, target.collective_base_s * latency + sent)
