"""spec -> graph: one sub-layer a kind, composed from the axes of the spec."""
from __future__ import annotations

from mkgen.graph.ir import LayerGraph
from mkgen.graph.kinds import FFNS, MIXERS
from mkgen.graph.stream import Stream
from mkgen.spec.model import Spec


def build_graph(spec: Spec) -> LayerGraph:
    """The layer graph of a valid spec."""
    model = spec.model
    stream = Stream(model)
    used = {run.mixer for run in model.schedule}, {run.ffn for run in model.schedule}
    mixers = {n: stream.sublayer(n, "mixer", MIXERS, k, spec) for n, k in model.mixers.items() if n in used[0]}
    ffns = {n: stream.sublayer(n, "ffn", FFNS, k, spec) for n, k in model.ffns.items() if n in used[1]}
    return LayerGraph(begin=stream.begin(mixers), mixers=mixers, ffns=ffns, end=stream.end(),
                      layers=tuple((run.mixer, run.ffn) for run in model.schedule), facts=stream.facts())
