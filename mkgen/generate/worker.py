"""The process that decodes: `python -m mkgen.generate.worker`, a JSON request on stdin, one JSON line a step on stdout.

A process of its own, because the number of virtual devices is fixed when JAX starts. Request: module (its folder),
packed (its weights), prompt (token ids), tokens (how many to make), stop (ids that end it), interpret.
Lines: {"ready": seconds}, then {"position": p, "token": id} for each step: the greedy token that follows position p.
"""
from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path


def main() -> None:
    request = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr                          # stdout is for the lines alone

    def say(**line) -> None:
        print(json.dumps(line), file=out, flush=True)

    began = time.perf_counter()
    import numpy as np
    module = Path(request["module"])
    sys.path.insert(0, str(module.parent))
    host = importlib.import_module(f"{module.name}.host")
    rows = min(host.SPEC["rows"])
    mesh = host.make_mesh()
    weights, state = host.load_weights(request["packed"], mesh), host.init_state(mesh, rows)
    step = host.make_decode_step(mesh, rows, interpret=bool(request["interpret"]))
    say(ready=time.perf_counter() - began)
    ids, made = list(request["prompt"]), 0
    for position in range(len(ids) + request["tokens"] - 1):
        tokens, positions = np.zeros((rows, 1), np.int32), np.full(rows, -1, np.int32)      # one row is active
        tokens[0], positions[0] = ids[position], position
        following, _, state = step(weights, state, tokens, positions)
        token = int(following[0, 0])
        if position == len(ids) - 1:
            ids.append(token)
            made += 1
        say(position=position, token=token)
        if made and (token in request["stop"] or made == request["tokens"]):
            break


if __name__ == "__main__":
    main()
