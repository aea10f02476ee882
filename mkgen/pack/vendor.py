"""How a checkpoint keeps a tensor: plain, or quantised by one of the tools in use; found by the names beside its own.

A `Layout` knows its tensors, their dtypes and shapes, and reads a matrix [N, K] as a `Coded`, without loss. N are the outputs: a
quantised tensor is [out, in] here, however its tool stores it. A stack of experts has one more axis in front, read one expert at a
time. X is the tensor's name in the spec, x the same without `.weight`:

    fp8                 X e4m3, X_scale_inv or X_scale of one number, one an output, or one a 128 x 128 block
    int8                X i8, X_scale of one number or one an output
    int4 (pack-quantized)     X_packed i32 [N, K/8], X_scale [N, K/G], X_zero_point i32 [N/8, K/G]
    gptq                x.qweight i32 [K/8, N], x.qzeros i32 [K/G, N/8] less one (v2: as they are), x.scales [K/G, N], x.g_idx
    awq                 x.qweight i32 [K, N/8], x.qzeros i32 [K/G, N/8], x.scales [K/G, N]; nibbles hold columns 0 2 4 6 1 3 5 7
    mxfp4               X_packed u8 [N, K/2], or X itself, with X_scale u8 [N, K/32]; or X_blocks u8 [N, K/32, 16], X_scales
    nvfp4               X u8 [N, K/2], X_scale e4m3 [N, K/16], X_scale_2; or X_packed with X_global_scale, its reciprocal
"""
from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from mkgen.errors import MkgenError
from mkgen.pack.coded import Coded
from mkgen.pack.formats import check_exponents

FLOATS = ("bf16", "f32", "f16")
GROUPS = (128, 64, 32)                       # of int4 formats
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)         # the nibble that holds column i
# of activations and caches, which are not quantised here
SPARE = ("input_scale", "input_global_scale", "activation_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "weight_shape")
Fault = tuple[str, str, str]                 # (missing | misshapen | misdtyped | unreadable, tensor, detail)


class Tensors(Protocol):
    quantization: dict

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str: ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray: ...


class Layout:
    """One tensor of a checkpoint, `name` in the spec. lead: axes in front of a matrix's own, 1 for a stack of experts."""
    words = "plain"
    coded, turned = True, True               # turned: [out, in] whatever its tool stores, so that a cut `T` is not for it

    def __init__(self, tensors: Tensors, name: str, lead: int, **parts: str):
        self.tensors, self.name, self.lead = tensors, name, lead
        self.parts = {part: n for part, n in parts.items() if n in tensors}
        self.missing = [n for part, n in parts.items() if n not in tensors and part in self.needs]

    needs: tuple[str, ...] = ("weight",)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that are read."""
        return tuple(self.parts.values())

    @property
    def spare(self) -> tuple[str, ...]:
        """Tensors that belong to it and say nothing about weights."""
        if not self.coded:
            return ()
        stem = self.name.removesuffix("weight")
        stem = stem if stem != self.name else self.name + "_"
        return tuple(n for n in (stem + end for end in SPARE) if n in self.tensors and n not in self.names)

    @property
    def dtype(self) -> str:
        """For people: a dtype, or how it is quantised."""
        return self.words if self.coded else self.tensors.dtype(self.parts["weight"])

    def shape_of(self, part: str) -> tuple[int, ...]:
        return self.tensors.shape(self.parts[part])

    @property
    def shape(self) -> tuple[int, ...]:
        """As if it were plain: [(experts,) N, K], or a vector's."""
        return self.shape_of("weight")

    def expected(self) -> dict[str, tuple[list[tuple[int, ...]], tuple[str, ...]]]:
        """Part -> the shapes and the dtypes that it may have, given those of the weight itself."""
        return {}

    def faults(self) -> list[Fault]:
        """What is wrong with its tensors taken by themselves."""
        out: list[Fault] = [("missing", n, f"{self.name} is {self.words}, and this part of it is not there") for n in self.missing]
        if out:
            return out
        weight = self.parts["weight"]
        if self.coded and len(self.shape_of("weight")) != self.lead + self.axes:
            axes = "a stack of matrices" if self.lead else "a matrix"
            return [("misshapen", weight, f"{self.words} is {list(self.shape_of('weight'))}, no {axes}")]
        for part, (shapes, dtypes) in self.expected().items():
            if part not in self.parts:
                continue
            name, shape, dtype = self.parts[part], self.shape_of(part), self.tensors.dtype(self.parts[part])
            if shape not in shapes:
                may = " or ".join(str(list(s)) for s in dict.fromkeys(shapes))
                out.append(("misshapen", name, f"{part} of {self.words}: {list(shape)}, not {may}"))
            if dtype not in dtypes:
                out.append(("misdtyped", name, f"{part} of {self.words}: {dtype}, not {' or '.join(dtypes)}"))
        return out

    axes = 2

    def part(self, part: str, expert: int | None) -> np.ndarray:
        """One part, of one expert where there is a stack of them."""
        name = self.parts[part]
        if self.lead and len(self.tensors.shape(name)) > 0:
            return self.tensors.read(name, expert, expert + 1)[0]
        return self.tensors.read(name)

    def number(self, part: str, expert: int | None) -> float:
        """A part of one number, or of one number an expert."""
        name = self.parts[part]
        a = self.tensors.read(name).reshape(-1)
        return float(a[expert if len(a) > 1 else 0])

    def read(self, expert: int | None = None) -> np.ndarray | Coded:
        """The tensor, or one expert of a stack. A vector or table is as it is stored."""
        return self.part("weight", expert)

    def bytes(self, expert: int | None = None) -> int:
        """Of what `read` reads."""
        from mkgen.pack.hub import NUMPY
        size = sum(math.prod(self.tensors.shape(n)) * np.dtype(NUMPY[self.tensors.dtype(n)]).itemsize for n in self.names)
        return size // self.shape[0] if expert is not None and self.lead else size


    @property
    def group(self) -> int:
        """The group size that the folder's configuration tells; 0: none."""
        q = self.tensors.quantization
        groups = [g.get("weights") or {} for g in (q.get("config_groups") or {}).values()]
        return next((size for size in (q.get("group_size"), q.get("q_group_size"), *(g.get("group_size") for g in groups))
                     if isinstance(size, int) and size > 0), 0)


class Plain(Layout):
    coded = turned = False


def scales_of(weight: tuple[int, ...], lead: int, block: tuple[int, int]) -> list[tuple[int, ...]]:
    """The shapes that scales of fp8 and int8 have: one number, one an output, one a block."""
    front, (n, k) = weight[:lead], weight[lead:]
    one = [front, (*front, 1), (*front, 1, 1)]
    return one + [(*front, n), (*front, n, 1), (*front, -(-n // block[0]), -(-k // block[1]))]


class Fp8(Layout):
    words, needs, turned = "fp8", ("weight", "scale"), False

    @property
    def block(self) -> tuple[int, int]:
        n, k = self.tensors.quantization.get("weight_block_size") or (128, 128)
        return n, k

    def expected(self):
        return {"scale": (scales_of(self.shape, self.lead, self.block), FLOATS)}

    def faults(self):
        out = super().faults()
        if not out and self.block[1] % 128:
            out.append(("unreadable", self.parts["weight"], f"fp8 in blocks of {list(self.block)}; K must be a multiple of 128"))
        return out

    def read(self, expert=None):
        codes = self.part("weight", expert).view(np.uint8)
        scale, (n, k) = self.part("scale", expert).astype(np.float32), codes.shape
        blocks = scale.ndim == 2 and self.parts["scale"].endswith("_inv")        # of a small matrix there is one
        if not blocks and (scale.size == 1 or scale.shape in ((n,), (n, 1))):
            return Coded("fp8", codes, np.broadcast_to(scale.reshape(-1, 1), (n, 1)))
        rows, columns = self.block
        scale = np.repeat(np.repeat(scale, rows, 0)[:n], columns // 128, 1)[:, :-(-k // 128)]
        return Coded("fp8_block", codes, scale)


class Int8(Layout):
    words, needs, turned = "int8", ("weight", "scale"), False

    def expected(self):
        return {"scale": (scales_of(self.shape, self.lead, (0x7FFFFFFF, 0x7FFFFFFF))[:-1], FLOATS)}

    def read(self, expert=None):
        codes, scale = self.part("weight", expert), self.part("scale", expert).astype(np.float32)
        return Coded("int8", codes, np.broadcast_to(scale.reshape(-1, 1), (len(codes), 1)))


class Mxfp4(Layout):
    """Pairs of codes in a byte, the even K in the low nibble."""
    words, needs = "mxfp4", ("weight", "scale")

    @property
    def shape(self):
        *front, k = self.shape_of("weight")
        return (*front, k * 2)

    def expected(self):
        *front, k = self.shape
        return {"weight": ([self.shape_of("weight")], ("u8",)), "scale": ([(*front, -(-k // 32))], ("u8", "f8_e8m0"))}

    def read(self, expert=None):
        return self.coded_of(self.part("weight", expert), self.part("scale", expert).view(np.uint8))

    def coded_of(self, packed: np.ndarray, scale: np.ndarray) -> Coded:
        check_exponents(scale, self.parts["scale"])
        return Coded("mxfp4", nibbles(packed), np.ldexp(np.float32(1), scale.astype(np.int32) - 127))


class Blocks(Mxfp4):
    """The same, cut into blocks of 16 bytes: [N, K/32, 16]."""
    words, axes = "mxfp4 blocks", 3

    @property
    def shape(self):
        *front, groups, _ = self.shape_of("weight")
        return (*front, groups * 32)

    def expected(self):
        *front, k = self.shape
        return {"weight": ([(*front, k // 32, 16)], ("u8",)), "scale": ([(*front, k // 32)], ("u8", "f8_e8m0"))}

    def read(self, expert=None):
        packed, scale = self.part("weight", expert), self.part("scale", expert).view(np.uint8)
        return self.coded_of(packed.reshape(len(packed), -1), scale)


class Nvfp4(Layout):
    words, needs = "nvfp4", ("weight", "scale", "tensor_scale")
    reciprocal = False

    @property
    def shape(self):
        *front, k = self.shape_of("weight")
        return (*front, k * 2)

    def expected(self):
        *front, k = self.shape
        ones = [(), (1,), *([tuple(front[:1]), (*front[:1], 1)] if self.lead else [])]
        return {"weight": ([self.shape_of("weight")], ("u8",)), "scale": ([(*front, -(-k // 16))], ("f8_e4m3",)),
                "tensor_scale": (ones, ("f32",))}

    def read(self, expert=None):
        tensor = np.float32(self.number("tensor_scale", expert))
        with np.errstate(divide="ignore"):
            tensor = np.float32(1) / tensor if self.reciprocal else tensor
        return Coded("nvfp4", nibbles(self.part("weight", expert)), self.part("scale", expert).astype(np.float32),
                     tensor_scale=float(tensor))


class Nvfp4Packed(Nvfp4):
    reciprocal = True


class PackedInt4(Layout):
    """Eight nibbles an int32 along K, a value plus 8 in each; zero points likewise, along N."""
    words, needs = "int4 (pack-quantized)", ("weight", "scale")

    @property
    def shape(self):
        *front, words = self.shape_of("weight")
        return (*front, words * 8)

    def expected(self):
        *front, k = self.shape
        groups = self.shape_of("scale")[-1]
        return {"weight": ([self.shape_of("weight")], ("i32",)), "scale": ([(*front, groups)], FLOATS),
                "zeros": ([(*front[:-1], -(-front[-1] // 8), groups)], ("i32",)), "order": ([(k,)], ("i32", "i64"))}

    def read(self, expert=None):
        codes = unpack_int32(self.part("weight", expert))
        zeros = unpack_int32(self.part("zeros", expert).T).T[:len(codes)] if "zeros" in self.parts else None
        order = self.part("order", expert) if "order" in self.parts else None
        return grouped_int4(codes, self.part("scale", expert), zeros, order, self.group)


class Gptq(Layout):
    words, needs = "gptq", ("weight", "zeros", "scale")

    @property
    def shape(self):
        *front, words, n = self.shape_of("weight")
        return (*front, n, words * 8)

    def expected(self):
        *front, n, k = self.shape
        groups = self.shape_of("scale")[-2]
        return {"weight": ([self.shape_of("weight")], ("i32",)), "scale": ([(*front, groups, n)], FLOATS),
                "zeros": ([(*front, groups, -(-n // 8))], ("i32",)), "order": ([(*front, k)], ("i32", "i64"))}

    def faults(self):
        out, bits = super().faults(), self.tensors.quantization.get("bits", 4)
        return out if bits == 4 else [("unreadable", self.parts["weight"], f"{self.words} with {bits} bits; 4 can be read")] + out

    def read(self, expert=None):
        codes = unpack_int32(self.part("weight", expert).T)
        less = 0 if self.tensors.quantization.get("checkpoint_format") == "gptq_v2" else 1
        zeros = (unpack_int32(self.part("zeros", expert)) + less).T[:len(codes)]
        order = self.part("order", expert) if "order" in self.parts else None
        return grouped_int4(codes, self.part("scale", expert).T, zeros, order, self.group)


class Awq(Gptq):
    words = "awq"

    @property
    def shape(self):
        *front, k, words = self.shape_of("weight")
        return (*front, words * 8, k)

    def read(self, expert=None):
        codes, zeros = (unpack_int32(self.part(p, expert), AWQ_ORDER).T for p in ("weight", "zeros"))
        return grouped_int4(codes, self.part("scale", expert).T, zeros, None, self.group)


# -- which one -------------------------------------------------------------------------------------------------------

def find(tensors: Tensors, name: str, lead: int = 0) -> Layout | None:
    """How the checkpoint keeps the tensor that the spec calls `name`; None if it has nothing of that name."""
    stem = name.removesuffix(".weight")
    if f"{stem}.qweight" in tensors:
        parts = {p: f"{stem}.{n}" for p, n in (("weight", "qweight"), ("zeros", "qzeros"), ("scale", "scales"), ("order", "g_idx"))}
        scale = parts["scale"]
        n = tensors.shape(scale)[-1] if scale in tensors else 0
        return (Awq if tensors.shape(parts["weight"])[-1] * 8 == n else Gptq)(tensors, name, lead, **parts)
    if name in tensors:
        return _by_dtype(tensors, name, lead)
    if f"{name}_packed" in tensors:
        parts = {"weight": f"{name}_packed", "scale": f"{name}_scale"}
        if tensors.dtype(parts["weight"]) == "i32":
            return PackedInt4(tensors, name, lead, **parts, zeros=f"{name}_zero_point", order=f"{name}_g_idx")
        if f"{name}_global_scale" in tensors:
            return Nvfp4Packed(tensors, name, lead, **parts, tensor_scale=f"{name}_global_scale")
        return Mxfp4(tensors, name, lead, **parts)
    if f"{name}_blocks" in tensors:
        return Blocks(tensors, name, lead, weight=f"{name}_blocks", scale=f"{name}_scales")
    return None


def _by_dtype(tensors: Tensors, name: str, lead: int) -> Layout:
    dtype, scale = tensors.dtype(name), f"{name}_scale"
    if dtype == "f8_e4m3":
        return Fp8(tensors, name, lead, weight=name, scale=f"{name}_scale_inv" if f"{name}_scale_inv" in tensors else scale)
    if dtype == "i8":
        return Int8(tensors, name, lead, weight=name, scale=scale)
    if dtype == "u8" and f"{name}_scale_2" in tensors:
        return Nvfp4(tensors, name, lead, weight=name, scale=scale, tensor_scale=f"{name}_scale_2")
    if dtype == "u8" and scale in tensors:
        return Mxfp4(tensors, name, lead, weight=name, scale=scale)
    return Plain(tensors, name, lead, weight=name)


# -- nibbles ---------------------------------------------------------------------------------------------------------

def nibbles(packed: np.ndarray) -> np.ndarray:
    """u8 [N, K/2] -> u8 [N, K], low nibble first."""
    out = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., 0])
    np.right_shift(packed, 4, out=out[..., 1])
    return out.reshape(len(packed), -1)


def unpack_int32(words: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """i32 [A, B] -> u8 [A, 8 B]: element i of a word is in nibble order[i]."""
    shifts = np.array(order, np.uint32) * 4
    out = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & 15
    return out.astype(np.uint8).reshape(len(words), -1)


def grouped_int4(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, order: np.ndarray | None,
                 told: int = 0) -> Coded | np.ndarray:
    """u8 codes [N, K], scales and zero points [N, K/G] -> `Coded` where it has the groups of a format, else f32 [N, K].

    order: the group of each k. Where it is no run after another (activation order) the values are exact, but no format's.
    told: G, if somebody said it; the last group may be short, so that it does not follow from the counts."""
    k, groups, kind = codes.shape[1], scales.shape[1], scales.dtype
    scales = np.ascontiguousarray(scales, np.float32)
    zeros = None if zeros is None else np.ascontiguousarray(zeros, np.float32)
    size = next((g for g in (told, *GROUPS) if g and -(-k // g) == groups), -(-k // groups))
    runs = np.arange(k) // size
    group = next((g for g in GROUPS if size % g == 0 or groups == 1), None)          # of one group any run is a part
    if group and (order is None or np.array_equal(order, runs)):
        def over(a: np.ndarray) -> np.ndarray:
            return np.repeat(a, -(-size // group), axis=1)[:, :-(-k // group)]
        kept = "_f16" if kind == np.float16 else ""
        if zeros is None or (zeros == 8).all():
            return Coded(f"int4_g{group}{kept}", codes ^ 8, over(scales))
        return Coded(f"int4_g{group}_zero{kept}", codes, over(scales), over(zeros))
    at = runs if order is None else order
    if at.min(initial=0) < 0 or at.max(initial=0) >= groups:
        raise MkgenError(f"g_idx names group {int(at.max())}, there are {groups} groups of scales")
    zero = np.float32(8) if zeros is None else zeros[:, at]
    return (codes.astype(np.float32) - zero) * scales[:, at]
