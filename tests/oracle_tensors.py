"""The tensors of an oracle's checkpoint without the checkpoint: names, shapes and the rule that draws each, in a few lines.

tensors.json: [[pattern, layers, experts, shape, rule], …]. `#` in a pattern stands for a layer, `@` for an expert; layers: the
layers that have it (none: it is the model's own), experts: how many, or 0. The rules are those of the scripts that made the
oracle: what a tensor is drawn from depends on what its kind is, and on what the class fills it with at first.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16
from oracle_weights import generator

Rule = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

RULES: dict[str, Rule] = {
    "log": lambda g, s: np.log(g.uniform(1.0, 16.0, s)),                           # A_log
    "step": lambda g, s: g.uniform(-3.0, 0.5, s),                                  # dt_bias
    "one": lambda g, s: g.uniform(0.6, 1.4, s),                                    # norm weights
    "zero": lambda g, s: g.uniform(-0.4, 0.4, s),                                  # norm weights that are added to 1
    "skip": lambda g, s: 1.0 + g.standard_normal(s) * 0.3,                         # D
    "select": lambda g, s: g.standard_normal(s) * 0.15,                            # a router's bias for the selection
    "sink": lambda g, s: g.standard_normal(s),
    "bias": lambda g, s: g.standard_normal(s) * 0.2,
    "wide": lambda g, s: g.standard_normal(s) * 0.5,                               # embeddings, convolutions
    "tied": lambda g, s: g.standard_normal(s) * (2.0 / np.sqrt(s[-1])),            # heads, and embeddings that are one
    "router": lambda g, s: g.standard_normal(s) * (1.5 / np.sqrt(s[-1])),
    "matrix": lambda g, s: g.standard_normal(s) * (1.0 / np.sqrt(max(s[-1], 1))),
    "constant": lambda g, s: np.zeros(s),                                          # computed by the class, no weight
}


def draw(key: tuple, name: str, shape: tuple[int, ...], rule: str) -> np.ndarray:
    """One tensor, bf16. key: (case, size, seed)."""
    return RULES[rule](generator(*key, name), shape).astype(np.float32).astype(bfloat16)


def make(folder: Path) -> dict[str, np.ndarray]:
    """Tensor name -> array, as the oracle's class read them."""
    meta = json.loads((folder / "meta.json").read_text())
    key = (meta["case"], meta["size"], meta["seed"])
    return {name: draw(key, name, tuple(shape), rule)
            for pattern, layers, experts, shape, rule in json.loads((folder / "tensors.json").read_text())
            for name in spelled(pattern, layers, experts)}


def spelled(pattern: str, layers: list[int], experts: int) -> Iterator[str]:
    for layer in layers or [None]:
        for expert in range(experts) if experts else [None]:
            yield pattern.replace("#", str(layer)).replace("@", str(expert))


def table(tensors: Mapping[str, np.ndarray], key: tuple) -> list[list]:
    """The lines of tensors.json for a checkpoint: the rule of each pattern is the one that gives its values, bit for bit."""
    groups: dict[tuple, dict[str, set]] = {}
    for name, array in tensors.items():
        layer, expert = re.search(r"layers\.(\d+)\.", name), re.search(r"experts\.(\d+)\.", name)
        pattern = re.sub(r"experts\.\d+\.", "experts.@.", re.sub(r"layers\.\d+\.", "layers.#.", name))
        group = groups.setdefault((pattern, array.shape), {"layers": set(), "experts": set(), "name": name})
        group["layers"] |= {int(layer[1])} if layer else set()
        group["experts"] |= {int(expert[1])} if expert else set()
    out = []
    for (pattern, shape), g in groups.items():
        have = tensors[g["name"]].astype(np.float32)
        fits = [r for r in RULES if r != "constant" and (draw(key, g["name"], shape, r).astype(np.float32) == have).all()]
        out.append([pattern, sorted(g["layers"]), len(g["experts"]), list(shape), fits[0] if fits else "constant"])
    return out
