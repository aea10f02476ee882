"""What the kernel says about storage formats: the constants of those in use, and the sections that have them."""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.plan.plan import Plan
from mkgen.plan.section import DEPTH, ROWS_PADDED, Section, expert_rows, few_rows, widens
from mkgen.spec.formats import FORMATS

DTYPES = {"int8": "jnp.int8", "e4m3": "jnp.float8_e4m3fn", "int4": "jnp.int4", "e2m1": "jnp.float4_e2m1fn"}


def constant(fmt: str, group: int, experts: bool = False) -> str:
    """The name of a format in the kernel; with its group, where that is finer than the format's own. experts: theirs is another."""
    finer = "" if group == FORMATS[fmt].group else f"_BY_{group}"
    return fmt.upper() + finer + "_EXPERTS" * experts


def left_operand(ref: str, of) -> str:
    """Source text of the left operand of a Matrix or Section: with its sums, where there are zero points. ref: a buffer, or one of a batch's."""
    name, dot, at = ref.partition(".at[")
    return f"({ref}, {name}_sums{dot}{at})" if FORMATS[of.format].zero else ref


@dataclass(frozen=True)
class Coded:
    """Of a plan: its sections with scales of groups, on the tape and among the experts."""
    streamed: tuple[Section, ...]        # on the tape, multiplied
    routed: tuple[Section, ...]          # of experts
    blocks: tuple[Section, ...]          # on the tape, decoded
    terms: int
    on_tape: bool
    rolled: bool                         # are there loops over panels?
    lone: bool                           # may experts be multiplied for the one row that chose them?

    @property
    def products(self) -> tuple[Section, ...]:
        return self.streamed + self.routed

    @property
    def sections(self) -> tuple[Section, ...]:
        return self.products + self.blocks

    @property
    def bytes(self) -> bool:
        """Are there codes that only columns scale?"""
        return any(not s.group for s in self.sections)

    @property
    def kinds(self) -> list[tuple[str, int]]:
        return sorted({(s.format, s.group) for s in self.sections})

    def has(self, test) -> bool:
        return any(test(fmt, group) for fmt, group in self.kinds)

    @property
    def zeros(self) -> bool:
        return self.has(lambda fmt, _: FORMATS[fmt].zero)

    @property
    def few(self) -> dict[str, int]:
        """Constant of a product's format -> the most decode rows that are multiplied row after row."""
        tape = {constant(s.format, s.group): few_rows(s.format, s.group, self.terms) for s in self.streamed}
        return tape | {self.kind(s): expert_rows(s.format, s.group, self.terms, self.lone) for s in self.routed}

    def kind(self, s: Section) -> str:
        """The name of the format of an expert's section: another than on the tape, if it is multiplied in another way."""
        way = few_rows(s.format, s.group, self.terms), expert_rows(s.format, s.group, self.terms, self.lone)
        return constant(s.format, s.group, way[0] != way[1] and any((s.format, s.group) == (t.format, t.group) for t in self.streamed))

    @property
    def widens(self) -> bool:
        return any(widens(s.format, s.group) and self.few[name] < ROWS_PADDED for name, s in self.named.items() if name in self.few)

    @property
    def named(self) -> dict[str, Section]:
        """Constant -> one of the sections that have this format."""
        return {constant(s.format, s.group): s for s in self.streamed + self.blocks} | {self.kind(s): s for s in self.routed}

    @property
    def columns(self) -> bool:
        return self.has(lambda fmt, _: FORMATS[fmt].tensor_scale or FORMATS[fmt].column)

    @property
    def scales(self) -> list[str]:
        return sorted({FORMATS[fmt].scale for fmt, group in self.kinds if group})

    @property
    def fp4(self) -> str:
        """all | some | '': do codes have to be widened to fp8?"""
        codes = {FORMATS[s.format].code for s in self.products}
        return "" if "e2m1" not in codes else "all" if len(codes) == 1 else "some"

    @property
    def rowwise(self) -> str:
        """all | some | '': are products multiplied row after row?"""
        few = set(self.few.values())
        return "" if not any(few) else "all" if few == {ROWS_PADDED} else "some"

    @property
    def sixteen(self) -> bool:
        """Has a dot sixteen groups, or more?"""
        return any(DEPTH // s.group >= 16 for s in self.products)

    @property
    def short(self) -> bool:
        """Is there a K that is no whole number of dots?"""
        return any(s.k % DEPTH for s in self.products)

    @property
    def parts(self) -> bool:
        """Do parts of K lie side by side?"""
        return any(s.parts > 1 for s in self.products)

    @property
    def formats(self) -> dict[str, str]:
        """Constant -> the arguments of its Format."""
        return {name: self.arguments(name, s.format, s.group) for name, s in sorted(self.named.items())}

    def arguments(self, name: str, fmt: str, group: int) -> str:
        f = FORMATS[fmt]
        args = [DTYPES[f.code], str(32 // f.bits), str(group), *([f'"{f.scale}"'] if len(self.scales) > 1 else []),
                *([str(self.few.get(name, 0))] if self.rowwise == "some" else [])]
        flags = {"zero": f.zero, "widen": self.widens and widens(fmt, group), "columns": f.tensor_scale or f.column}
        return ", ".join(args + [f"{name}=True" for name, on in flags.items() if on])

    def lines(self, s: Section) -> int:
        """Rows of a left operand for one decode row, if they stand row after row."""
        return self.terms * DEPTH // s.group

    def section(self, s: Section, at: int = 0, runs: str = "") -> str:
        """Source text of a section whose rows begin `at` rows further down. runs: of an expert's panels, as source text; else those of a loop."""
        args = [self.kind(s) if runs else constant(s.format, s.group), *map(str, (s.at + at, s.k, s.panels, s.scales_at + at, s.scale_rows,
                                                        runs or s.wide))]
        if s.kind.zero:
            args += [f"zeros_at={s.zeros_at + at}", f"zero_rows={s.zero_rows}"]
        if s.column_rows:
            args.append(f"columns_at={s.columns_at + at}")
        if s.parts > 1:
            args += [f"parts={s.parts}", f"span={s.span}"]
        return f"Section({', '.join(args)})"


def coded(plan: Plan) -> Coded:
    streamed, blocks = ([m.section for m in plan.matrices.values() if m.format != "bf16" and m.at_once is at_once and (m.group or at_once)]
                        for at_once in (False, True))
    routed = [s for image in plan.experts for s in (image.up, image.down) if s.group]
    terms = 2 if plan.spec.build.activations == "f32" else 1
    return Coded(tuple(streamed), tuple(routed), tuple(blocks), terms, bool(streamed or blocks),
                 bool(streamed) or any(not image.straight for image in plan.experts), plan.spec.build.lone_experts)
