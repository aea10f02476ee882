"""The rules that a plan is held against, in the order in which findings name them."""

RULES = {
    "expression": "source text in the plan names what exists, and stays within its shape, in every scenario",
    "pairing": "each start has one wait for the same copy on its semaphore, on every path; semaphores are zero at the end",
    "flight": "nothing is read before its wait, nothing written that a copy brings or takes; no two copies meet",
    "data": "a step reads what the copy it needs has brought; nothing is copied that no step reads",
    "state": "what is made for a state is written back, once, to where it came from",
    "value": "a step reads what an earlier step of the sub-layer made, complete; what is made is read",
    "tape": "chunks and entries follow one another, hold the blocks that steps read, and are all consumed",
    "loop": "loops that depend on data have a bound, and hold to it",
    "spread": "what a rank has a term of is summed over the ranks before a step that takes it for the sum, and once",
    "exchange": "exchanges start when all ranks are there, and finish in order, the same on every rank, within the places that peers write",
    "memory": "tile-padded VMEM and the spill reserve fit; no bytes are shared; SMEM tables, semaphores and names are in order",
}
