"""What the kernel says about storage formats: the constants of those in use, and the sections that have them."""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.plan.plan import Plan
from mkgen.plan.section import Section, few_rows, widens
from mkgen.spec.formats import FORMATS

DTYPES = {"int8": "jnp.int8", "e4m3": "jnp.float8_e4m3fn", "int4": "jnp.int4", "e2m1": "jnp.float4_e2m1fn"}


def constant(fmt: str, group: int) -> str:
    """The name of a format in the kernel; with its group, where that is finer than the format's own."""
    finer = "" if group == FORMATS[fmt].group else f"_BY_{group}"
    return fmt.upper() + finer


@dataclass(frozen=True)
class Coded:
    """Of a plan: its sections with scales of groups, on the tape and among the experts."""
    sections: tuple[Section, ...]
    terms: int

    @property
    def kinds(self) -> list[tuple[str, int]]:
        return sorted({(s.format, s.group) for s in self.sections})

    def has(self, test) -> bool:
        return any(test(fmt, group) for fmt, group in self.kinds)

    @property
    def zeros(self) -> bool:
        return self.has(lambda fmt, _: FORMATS[fmt].zero)

    @property
    def widens(self) -> bool:
        return self.has(widens)

    @property
    def columns(self) -> bool:
        return self.has(lambda fmt, _: FORMATS[fmt].tensor_scale)

    @property
    def scales(self) -> list[str]:
        return sorted({FORMATS[fmt].scale for fmt, _ in self.kinds})

    @property
    def fp4(self) -> str:
        """all | some | '': do codes have to be widened to fp8?"""
        codes = {FORMATS[fmt].code for fmt, _ in self.kinds}
        return "" if "e2m1" not in codes else "all" if len(codes) == 1 else "some"

    @property
    def fields(self) -> set[str]:
        """Of a Format, beyond those that all have."""
        has = {"scale": len(self.scales) > 1, "zero": self.zeros, "widen": self.widens, "columns": self.columns}
        return {name for name, needed in has.items() if needed}

    @property
    def formats(self) -> dict[str, str]:
        """Constant -> the arguments of its Format."""
        return {constant(fmt, group): self.arguments(fmt, group) for fmt, group in self.kinds}

    def arguments(self, fmt: str, group: int) -> str:
        f, fields = FORMATS[fmt], self.fields
        args = [DTYPES[f.code], str(32 // f.bits), str(group), *([f'"{f.scale}"'] if "scale" in fields else []),
                str(few_rows(fmt, group, self.terms))]
        flags = {"zero": f.zero, "widen": widens(fmt, group), "columns": f.tensor_scale}
        return ", ".join(args + [f"{name}=True" for name, on in flags.items() if on])

    def section(self, s: Section, at: int = 0, wide: int | None = None) -> str:
        """Source text of a section whose rows begin `at` rows further down; wide: all panels at once if None."""
        args = [constant(s.format, s.group), *map(str, (s.at + at, s.k, s.panels, s.panel_rows, s.scales_at + at, s.scale_rows,
                                                        wide or s.panels))]
        if s.kind.zero:
            args += [f"zeros_at={s.zeros_at + at}", f"zero_rows={s.zero_rows}"]
        if s.column_rows:
            args.append(f"columns_at={s.columns_at + at}")
        return f"Section({', '.join(args)})"


def coded(plan: Plan) -> Coded:
    sections = [m.section for m in plan.matrices.values() if m.group]
    return Coded(tuple(sections), 2 if plan.spec.build.activations == "f32" else 1)
