"""The rival: the decode step of a spec as a careful user of plain JAX would write it, with no kernel of its own.

`model.Rival(spec, ...)` makes the step and its arrays, `hlo` counts what XLA made of it, `worker` compiles one program in a
process of its own. Nothing here shares code with mkgen's graph, plan or emitter: only the spec says what both compute.
"""
