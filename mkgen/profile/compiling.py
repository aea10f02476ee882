"""Pieces -> cycles: what the cache does not know goes through the TPU compiler, in one subprocess."""
from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mkgen.errors import MkgenError
from mkgen.profile import cache
from mkgen.profile.listing import UnreadableListing, read_listing
from mkgen.profile.scoreboard import Cycles, cycles_of_loop
from mkgen.prove.compile import head, tail, worker_environment

TIMEOUT_SECONDS = 1800
DUMP = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"


class NotProfiled(MkgenError):
    """The compiler refused a piece, or left a listing that cannot be read."""


@dataclass(frozen=True)
class Job:
    """Pieces of one kernel and rows variant. source: the kernel's; places: name -> (space, dims, dtype) of all that pieces may use."""
    source: str
    rows: int
    ranks: int
    topology: str
    vmem: int
    places: dict[str, tuple[str, tuple[int, ...], str]]


@dataclass(frozen=True)
class Asked:
    """A piece by its cache key. alone: it does not ask which rank it is; about: what a reader of the cache file would like to know."""
    key: str
    function: str
    uses: tuple[str, ...]
    barrier: bool
    alone: bool
    about: str


def measure(job: Job, asked: list[Asked]) -> dict[str, Cycles]:
    """Key -> cycles. Raises `NotProfiled` with the piece and the compiler's words if one does not compile."""
    found = {a.key: cache.load(a.key) for a in asked}
    missing = list({a.key: a for a in asked if found[a.key] is None}.values())
    while missing:
        missing, done = compiled(job, missing)
        found |= done
    return found


def compiled(job: Job, missing: list[Asked]) -> tuple[list[Asked], dict[str, Cycles]]:
    """(what a compiler that died has left over, key -> cycles of the rest)."""
    with tempfile.TemporaryDirectory(prefix="mkgen-profile-") as folder:
        scratch = Path(folder)
        pieces = [{"name": f"piece_{n}", "function": a.function, "uses": a.uses, "barrier": a.barrier, "alone": a.alone} for n, a in enumerate(missing)]
        told = {"source": job.source, "rows": job.rows, "ranks": job.ranks, "topology": job.topology, "vmem": job.vmem,
                "places": job.places, "pieces": pieces}
        (scratch / "job.json").write_text(json.dumps(told), encoding="utf-8")
        environment = worker_environment(scratch / "dump", DUMP)
        with (scratch / "said").open("w+", encoding="utf-8") as said, (scratch / "err").open("w+", encoding="utf-8") as err:
            try:
                code = subprocess.run([sys.executable, "-m", f"{__package__}.worker", str(scratch / "job.json")], stdin=subprocess.DEVNULL,
                                      stdout=said, stderr=err, timeout=TIMEOUT_SECONDS, env=environment).returncode
            except subprocess.TimeoutExpired:
                raise NotProfiled(f"profile: the compiler was stopped after {TIMEOUT_SECONDS} s at {len(missing)} pieces, {missing[0].about} the first") from None
        lines = (scratch / "said").read_text(encoding="utf-8").splitlines()
        answers = [json.loads(line) for line in lines if line.startswith('{"name"')]
        done = {}
        for asked, answer in zip(missing, answers):
            if "error" in answer:
                raise NotProfiled(f"profile: the compiler refuses {asked.about}\n  why: {head(answer['error'])}\n  the piece:\n{asked.function}")
            done[asked.key] = read(scratch / "dump", answer["name"], asked)
            cache.store(asked.key, done[asked.key], {"what": asked.about, "rows": job.rows})
        if not done:
            words = tail((scratch / "err").read_text(encoding="utf-8", errors="replace"))
            raise NotProfiled(f"profile: the compiler ended with code {code} at {missing[0].about}; its last words:\n{words}\n"
                              f"  the piece:\n{missing[0].function}")
        return missing[len(done):], done


def read(dump: Path, name: str, asked: Asked) -> Cycles:
    listings = [p for p in dump.glob(f"*-{name}.*final_bundles.txt") if "schedule" not in p.name]
    if not listings:
        raise NotProfiled(f"profile: no listing of {asked.about} ({name}) in {sorted(p.name for p in dump.iterdir())[:4]}: "
                          "this libtpu names its dumps in another way")
    try:
        return cycles_of_loop(read_listing(max(listings)))
    except (UnreadableListing, IndexError) as error:
        raise NotProfiled(f"profile: the listing of {asked.about} cannot be read: {error}") from None
