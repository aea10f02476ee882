"""When the core wants each copy: the slack of a prefetch, and how long a slot is taken."""
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

from mkgen.simulate.events import Await, Event, Fetch, Pause, Receive, Send, Work
from mkgen.simulate.timeline import Timeline
from mkgen.targets import Target

NEVER = -1.0


def needs(events: Iterable[Event], timeline: Timeline, target: Target) -> tuple[float, ...]:
    """For each hbm span of the timeline, in its order: the moment, in seconds, at which the core comes to the copy's wait (whether it
    then waits or not); `NEVER` if it does not. The timeline is the replay of the same events."""
    copies, phases = timeline.track("hbm"), timeline.track("link")
    started: dict[object, deque[int]] = defaultdict(deque)
    sent: dict[object, deque[int]] = defaultdict(deque)
    out, fetched, messages, now = [NEVER] * len(copies), 0, 0, 0.0
    for e in events:
        if isinstance(e, Work):
            now += e.cycles / target.clock_hz
        elif isinstance(e, Pause):
            now += e.seconds
        elif isinstance(e, Fetch):
            started[e.key].append(fetched)
            fetched += 1
        elif isinstance(e, Send):
            sent[e.key].append(messages)
            messages += 1
        elif isinstance(e, Await):
            i = started[e.key].popleft()
            out[i], now = now, max(now, copies[i].end)
        elif isinstance(e, Receive):
            now = max(now, phases[sent[e.key].popleft()].end)
    if (fetched, messages) != (len(copies), len(phases)):
        raise ValueError(f"{fetched} copies and {messages} messages are started, the timeline has {len(copies)} and {len(phases)}")
    return tuple(out)
