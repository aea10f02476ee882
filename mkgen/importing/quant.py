"""quantization_config, or hf_quant_config.json, to the storage format of each role."""
from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mkgen.importing.config import Config
from mkgen.importing.listing import names
from mkgen.importing.record import Record, shown
from mkgen.spec.formats import FORMATS
from mkgen.spec.model import Model
from mkgen.spec.params import copies
from mkgen.spec.roles import Tensor, tensors

QUANT_KEY = "quantization_config"
NEVER = ("embed", "router", "shared_scale")      # no linear layer, or one that every quantiser leaves alone


@dataclass(frozen=True)
class Quantised:
    """format: of FORMATS. skipped: patterns of module names (`re:` a regular expression, else a name, a prefix or a shell
    pattern) that keep bf16. source: for the comment. wanted: like skipped, where only those are quantised."""
    format: str
    skipped: tuple[str, ...]
    source: str
    wanted: tuple[str, ...] = ()


def quantisation(config: Config, record: Record) -> Quantised | None:
    """What the config says about stored weights; None: nothing, or something that is refused (and recorded)."""
    text = config.raw.get("text_config") or {}
    q = config.raw.get(QUANT_KEY) or (text.get(QUANT_KEY) if isinstance(text, dict) else None)
    key = QUANT_KEY
    if not q and config.quant:
        q, key = {"quant_method": "modelopt", **(config.quant.get("quantization") or {})}, "hf_quant_config.json"
    if not q:
        return None
    if not isinstance(q, dict):
        record.refuse(key, f"is {shown(q)}, not a mapping")
        return None
    record.used[key] = q
    method = q.get("quant_method")
    if method == "modelopt" and isinstance(q.get("quantization"), dict):
        q = {**q, **q["quantization"]}
    read = _METHODS.get(method)
    before = len(record.refused)
    if read is None:
        record.refuse(f"{key}.quant_method", f"is {shown(method)}; what it stores is known for {', '.join(_METHODS)}",
                      "write the format by hand under build.formats, after --model-only")
        return None
    made = read(q, key, record)
    dtypes = [c.get(name) for c in (config.raw, text) if isinstance(c, dict) for name in ("torch_dtype", "dtype")]
    if method in ("gptq", "awq") and "bfloat16" not in dtypes and f"{made.format}_f16" in FORMATS:
        made = replace(made, format=f"{made.format}_f16")       # these tools store scales in the model's dtype, float16 unless said
    return made if len(record.refused) == before else None


def _fp8(q: dict, key: str, record: Record) -> Quantised:
    if q.get("fmt", "e4m3") != "e4m3":
        record.refuse(f"{key}.fmt", f"is {q['fmt']}; fp8 weights are read as e4m3")
    block = q.get("weight_block_size")
    if block not in (None, [128, 128]):
        record.refuse(f"{key}.weight_block_size", f"is {block}; scales of 128 x 128 blocks, or of whole tensors, can be stored")
    skipped = (*(q.get("modules_to_not_convert") or ()), *(q.get("ignored_layers") or ()), "lm_head")
    return Quantised("fp8_block" if block else "fp8", skipped, "fp8, e4m3" + (", 128 x 128 blocks" if block else ""))


def _mxfp4(q: dict, key: str, record: Record) -> Quantised:
    return Quantised("mxfp4", (*(q.get("modules_to_not_convert") or ()), "lm_head"), "mxfp4", ("*.experts*",))


def _int4(q: dict, key: str, record: Record) -> Quantised:
    bits, group = q.get("bits", q.get("w_bit")), q.get("group_size", q.get("q_group_size"))
    awq = q["quant_method"] == "awq"
    if q.get("desc_act"):
        record.refuse(f"{key}.desc_act", "is true: groups of scattered rows (act-order) are no run of weights along K")
    if awq and q.get("version", "gemm") not in ("gemm", "gemv"):
        record.refuse(f"{key}.version", f"is {q['version']}; AWQ's gemm layout is known")
    zero = bool(q.get("zero_point", True)) if awq else not q.get("sym", True)
    skipped = [*(q.get("modules_to_not_convert") or ())] + ([] if q.get("lm_head") else ["lm_head"])
    for rule, change in (q.get("dynamic") or {}).items():
        if not rule.startswith("-:"):
            record.refuse(f"{key}.dynamic", f"{rule} stores some modules otherwise ({shown(change)})")
        skipped.append("re:" + rule.removeprefix("-:"))
    return Quantised(_int4_name(bits, group, zero, key, record), tuple(skipped),
                     f"{q['quant_method'].upper()}, {bits} bits, groups of {group}{', zero points' if zero else ''}")


def _int4_name(bits: Any, group: Any, zero: bool, key: str, record: Record) -> str:
    name = f"int{bits}_g{group}{'_zero' if zero else ''}"
    if name not in FORMATS:
        record.refuse(key, f"{bits} bits in groups of {group}{' with zero points' if zero else ''} is no format that can be stored",
                      f"choose among {', '.join(f for f in FORMATS if f.startswith('int') and 'f16' not in f)}, and pack with --convert")
        return "bf16"
    return name


def _compressed(q: dict, key: str, record: Record) -> Quantised:
    groups = list((q.get("config_groups") or {}).values())
    formats = {_compressed_group(g.get("weights") or {}, g.get("format") or q.get("format") or "", key, record) for g in groups}
    if len(formats) != 1:
        record.refuse(f"{key}.config_groups", f"stores weights in {len(formats)} ways; one is expected")
        return Quantised("bf16", (), "")
    wanted = tuple(t for g in groups for t in g.get("targets") or () if t != "Linear")
    return Quantised(formats.pop(), tuple(q.get("ignore") or ()), f"compressed-tensors, {q.get('format')}", wanted)


def _compressed_group(w: dict, layout: str, key: str, record: Record) -> str:
    bits, kind, strategy, group = w.get("num_bits"), w.get("type"), w.get("strategy"), w.get("group_size")
    if w.get("actorder") not in (None, False, "static", "weight"):
        record.refuse(f"{key}.config_groups", f"actorder is {w['actorder']}: groups of scattered rows are no run of weights along K")
    if kind == "float" and bits == 4:
        return {"mxfp4-pack-quantized": "mxfp4", "nvfp4-pack-quantized": "nvfp4"}.get(layout) or ("nvfp4" if group == 16 else "mxfp4")
    if kind == "float" and bits == 8 and strategy in ("tensor", "channel"):
        return "fp8"
    if kind == "float" and bits == 8 and strategy == "block" and w.get("block_structure") in ([128, 128], "128x128"):
        return "fp8_block"
    if kind == "int" and bits == 8 and strategy in ("tensor", "channel") and w.get("symmetric", True):
        return "int8"
    if kind == "int" and strategy == "group":
        return _int4_name(bits, group, not w.get("symmetric", True), key, record)
    record.refuse(f"{key}.config_groups", f"weights of {bits} bits, type {kind}, strategy {strategy} are no format that can be stored")
    return "bf16"


def _modelopt(q: dict, key: str, record: Record) -> Quantised:
    algo, group = q.get("quant_algo"), q.get("group_size")
    names = {"NVFP4": "nvfp4", "FP8": "fp8", "FP8_PB_WO": "fp8_block", "W4A16_AWQ": f"int4_g{group}", "MXFP4": "mxfp4"}
    name = names.get(algo, "")
    if name not in FORMATS or name == "nvfp4" and group not in (None, 16):
        record.refuse(f"{key}.quant_algo", f"is {algo} with groups of {group}; known: {', '.join(names)}")
    return Quantised(name, tuple(q.get("exclude_modules") or q.get("ignore") or ()), f"modelopt, {algo}")


_METHODS = {"fp8": _fp8, "fbgemm_fp8": _fp8, "mxfp4": _mxfp4, "gptq": _int4, "awq": _int4, "compressed-tensors": _compressed,
            "modelopt": _modelopt, "modelopt_fp4": _modelopt}


# -- roles --------------------------------------------------------------------------------------------------------------------

def formats(model: Model, q: Quantised, unquantised: set[str], record: Record) -> dict[str, str]:
    """Family, 'experts' or 'rest' -> format, as few as say it. A family that is stored in two ways is refused."""
    stored: dict[str, str] = {}
    experts: dict[str, str] = {}
    for role, t in tensors(model).items():
        if len(t.shape) != 2:
            continue
        how = _format(model, role, t, q, unquantised, record)
        (experts if t.per == "expert" else stored)[role] = how
    if len(set(experts.values())) > 1:
        several = ", ".join(sorted(set(experts.values())))
        record.refuse(QUANT_KEY, f"stores the experts in several formats ({several}); they share one")
    out = {"experts": next(iter(experts.values()))} if experts else {}
    common = max(dict.fromkeys(stored.values()), key=list(stored.values()).count, default="bf16")
    rest = common if common != "bf16" else "bf16"
    out |= {"rest": rest} if rest != "bf16" else {}
    return {k: v for k, v in out.items() if v != "bf16"} | {r: v for r, v in stored.items() if v != rest}


def _format(model: Model, role: str, t: Tensor, q: Quantised, unquantised: set[str], record: Record) -> str:
    leaf = role.rpartition(".")[2]
    if leaf in NEVER or role in NEVER or role in unquantised:
        return "bf16"
    found: dict[str, str] = {}
    for name in names(model, t):
        module = name.removesuffix(".weight")
        found.setdefault("bf16" if _skipped(module, q) else q.format, name)
        if len(found) > 1:
            record.refuse(QUANT_KEY, f"leaves {found['bf16']} in bf16 and stores {found[q.format]} as {q.format}; a family "
                          f"({role}) has one format in all of its layers", "--model-only writes the model without a build")
            break
    return next(iter(found))


def _skipped(module: str, q: Quantised) -> bool:
    return bool(q.wanted) and not matches(module, q.wanted) or matches(module, q.skipped)


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the patterns means the module: compressed-tensors' `re:`, a shell pattern, or a module's name, whole or a part
    that begins and ends at a dot."""
    plain, compiled = _compiled(patterns)
    parts = module.split(".")
    runs = {".".join(parts[a:b]) for a in range(len(parts)) for b in range(a + 1, len(parts) + 1)}
    return not plain.isdisjoint(runs) or any(p.match(module) for p in compiled)


@lru_cache
def _compiled(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern, ...]]:
    """The plain names, and the rest as regular expressions."""
    plain, compiled = set(), []
    for p in patterns:
        if p.startswith("re:"):
            compiled.append(re.compile(p[3:]))
        elif any(ch in p for ch in "*?["):
            compiled += [re.compile(fnmatch.translate(p)), re.compile(fnmatch.translate(p + ".*"))]
        else:
            plain.add(p)
    return frozenset(plain), tuple(compiled)


def stored_bytes(model: Model, how: dict[str, str]) -> int:
    """Bytes of all weights in these formats, scales included. A tied head is stored once."""
    total = 0
    for role, t in tensors(model).items():
        matrix, expert = len(t.shape) == 2, t.per == "expert"
        name = how.get("experts" if expert else role, how.get("rest", "bf16") if matrix and not expert else "bf16")
        one = FORMATS[name].true_bytes(t.shape[1], t.shape[0]) if matrix else 2 * math.prod(t.shape)
        total += copies(model, t) * one
    return total
