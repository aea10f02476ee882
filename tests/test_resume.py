"""A pack that is interrupted goes on where it stopped, and ends with the bytes of one that was not."""
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hubs import checkpoint, make, same

from mkgen.errors import MkgenError
from mkgen.pack import journal, write
from mkgen.pack.packed import MANIFEST, PROGRESS, load_packed
from mkgen.pack.write import pack

def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def child(out, *args, **kwargs) -> int:
    """A process that packs, and stops as soon as it is told to; its output goes to a file."""
    pid = os.fork()
    if pid:
        return pid
    try:
        with open(f"{out}.log", "a") as log:
            pack(*args, say=lambda line: print(line, file=log, flush=True), **kwargs)
        os._exit(0)
    except BaseException as error:
        print(error, file=sys.stderr)
        os._exit(9)


def test_killed_at_any_moment(tmp_path, monkeypatch):
    """kill -9 after random times, again and again, also where one folder replaces another."""
    plan, t, hub = make(tmp_path, ranks=4, fmt="mxfp4")
    monkeypatch.setattr(write, "SYNC_BYTES", 1 << 18)
    out, whole = tmp_path / "out", tmp_path / "whole"
    began = time.perf_counter()
    pack(plan, hub, whole)
    takes = time.perf_counter() - began
    want, rng, log = contents(whole), random.Random(5), tmp_path / "out.log"
    kills = whole_runs = 0

    def resumed() -> int:
        return log.read_text().count("going on after") if log.exists() else 0

    for turn in range(80):                                        # how long a child takes is not known: the range follows what happens
        enough = kills >= 3 and resumed() >= 2 and whole_runs >= 3
        pid = child(out, plan, hub, out, force=True)
        if not enough and turn % 5 < 4:
            time.sleep(rng.random() * takes)
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            whole_runs += 1
            takes *= 0.8 if not enough and turn % 5 < 4 else 1.0  # it was over before it was killed
            assert contents(out) == want
            assert sorted(p.name for p in tmp_path.iterdir()) == ["hub", "kimi_k3.yaml", "out", "out.log", "whole"]
            if enough:
                return
        else:
            kills += 1
            takes *= 1.05
            if (out / MANIFEST).exists():                         # whatever is there is whole
                assert {n: b for n, b in contents(out).items() if n != PROGRESS} == want
    raise AssertionError(f"{kills} kills, {resumed()} packs went on, {whole_runs} were whole: too few to say anything")


class Stop(BaseException):
    pass


@pytest.fixture
def every_weight(monkeypatch):
    """Each weight is brought to disk by itself; but this machine's disk is not waited for."""
    monkeypatch.setattr(write, "SYNC_BYTES", 1)
    monkeypatch.setattr(write, "JOBS", 1)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(np.memmap, "flush", lambda self: None)


def stopped(monkeypatch, plan, hub, out, after, error=Stop, **kwargs):
    """A pack that ends with an error at the after-th weight."""
    put, count = write.put, iter(range(10**9))

    def failing(*args):
        if next(count) == after:
            raise error
        return put(*args)
    with monkeypatch.context() as m, pytest.raises((Stop, OSError, KeyboardInterrupt)):
        m.setattr(write, "put", failing)
        pack(plan, hub, out, **kwargs)


def test_every_weight_can_be_the_last(tmp_path, monkeypatch, every_weight):
    plan, t, _ = make(tmp_path, ranks=1, fmt="bf16")
    name = next(n for n in t if n.endswith("o_proj.weight"))
    t = {n: a.astype(np.float32) + np.float32(1e-6) if n == name else a for n, a in t.items()}
    hub, out = checkpoint(tmp_path / "odd", t), tmp_path / "out"
    figures = pack(plan, hub, tmp_path / "whole")
    want, todo = contents(tmp_path / "whole"), list(write.units(plan))
    ends = np.cumsum([0, *map(len, write._tasks(todo))])                          # what is done is counted in whole tasks
    for after in sorted({0, 1, 2, len(todo) // 3, len(todo) - 2, len(todo) - 1}):
        stopped(monkeypatch, plan, hub, out, after, error=[Stop, KeyboardInterrupt, OSError(28, "No space left on device")][after % 3])
        assert not out.exists()
        lines, last = [], []
        again = pack(plan, hub, out, say=lines.append, progress=lambda *p: last.append(p))
        done = ends[ends <= after][-1]
        assert again["resumed_after"] == done and len(last) == (ends > done).sum()
        assert lines == ([f"{out}.partial: going on after {done} of {len(todo)} weights"] if done else [])
        assert last[-1][0] == last[-1][1]
        assert contents(out) == want and not (tmp_path / "out.partial").exists()
        assert {k: v for k, v in again.items() if k not in ("seconds", "out", "resumed_after")} == \
               {k: v for k, v in figures.items() if k not in ("seconds", "out", "resumed_after")}
        for p in out.iterdir():
            p.unlink()
        out.rmdir()
    assert figures["rounded_to_bf16"]


def test_a_record_cut_at_any_byte(tmp_path, monkeypatch, every_weight):
    plan, _, hub = make(tmp_path, ranks=1)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    pack(plan, hub, tmp_path / "whole")
    want = contents(tmp_path / "whole")
    stopped(monkeypatch, plan, hub, out, 150)
    before = contents(partial)
    record = before[PROGRESS]
    assert record.count(b"\n") > 6
    for size in sorted({0, 1, record.index(b"\n"), record.index(b"\n") + 1, *random.Random(1).sample(range(len(record)), 4)}):
        partial.mkdir(exist_ok=True)
        for name, data in before.items():
            (partial / name).write_bytes(data[:size] if name == PROGRESS else data)
        pack(plan, hub, out, force=True)
        assert contents(out) == want


def test_killed_while_the_files_are_made(tmp_path, monkeypatch):
    plan, _, hub = make(tmp_path, ranks=1)
    pack(plan, hub, tmp_path / "whole")
    new_array, count = journal.new_array, iter(range(9))

    def failing(path, shape):
        if next(count) == 1:
            path.write_bytes(b"\x93NUMPY")
            raise Stop
        return new_array(path, shape)
    with monkeypatch.context() as m, pytest.raises(Stop):
        m.setattr(journal, "new_array", failing)
        pack(plan, hub, tmp_path / "out")
    assert pack(plan, hub, tmp_path / "out")["resumed_after"] == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("after", ["out.rename", "partial.rename", "rmtree"])
def test_killed_while_it_replaces(tmp_path, monkeypatch, after):
    plan, t, hub = make(tmp_path, ranks=1, fmt="bf16")
    out = tmp_path / "out"
    pack(plan, hub, out)
    name = next(n for n in t if n.endswith("o_proj.weight"))
    t[name] = -t[name]
    other = checkpoint(tmp_path / "other", t)
    pack(plan, other, tmp_path / "whole")
    rename = Path.rename

    def failing(self, target):
        rename(self, target)
        if after.startswith("out" if self == out else "partial"):
            raise Stop
    with monkeypatch.context() as m, pytest.raises(Stop):
        if after == "rmtree":
            m.setattr(journal.shutil, "rmtree", lambda path, **_: (Path(path) / MANIFEST).unlink() or (_ for _ in ()).throw(Stop()))
        else:
            m.setattr(Path, "rename", failing)
        pack(plan, other, out, force=True)
    if after == "out.rename":
        assert not out.exists()
        assert pack(plan, other, out, force=True)["resumed_after"] == len(list(write.units(plan)))
    load_packed(out, 0)
    assert {n: b for n, b in contents(out).items() if n != PROGRESS} == contents(tmp_path / "whole")
    pack(plan, hub, out, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hub", "kimi_k3.yaml", "other", "out", "whole"]


def test_what_was_begun_otherwise_is_refused(tmp_path, monkeypatch, every_weight):
    plan, t, hub = make(tmp_path, ranks=4)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    stopped(monkeypatch, plan, hub, out, 100)
    before = contents(partial)
    with pytest.raises(MkgenError, match=r"(?s)begun with another list of ranks\n.*delete .*out\.partial"):
        pack(plan, hub, out, ranks=[1])
    with pytest.raises(MkgenError, match="another --convert"):
        pack(plan, hub, out, convert=True)
    (tmp_path / "b").mkdir()
    other, *_ = make(tmp_path / "b", ranks=1)
    with pytest.raises(MkgenError, match="another spec, another list of ranks"):
        pack(other, hub, out)
    os.utime(hub / "model.safetensors", ns=(1, 1))
    with pytest.raises(MkgenError, match="another checkpoint"):
        pack(plan, hub, out)
    assert contents(partial) == before
    (partial / "tape.2.npy").unlink()
    os.utime(hub / "model.safetensors", ns=(2, 2))
    with pytest.raises(MkgenError):
        pack(plan, hub, out)


def test_a_file_that_is_gone(tmp_path, monkeypatch, every_weight):
    plan, t, hub = make(tmp_path, ranks=1)
    stopped(monkeypatch, plan, hub, tmp_path / "out", 100)
    (tmp_path / "out.partial" / "tape.0.npy").unlink()
    with pytest.raises(MkgenError, match=r"(?s)tape\.0\.npy: is not the file that was begun.*delete"):
        pack(plan, hub, tmp_path / "out")


def test_two_at_once(tmp_path, monkeypatch):
    plan, _, hub = make(tmp_path, ranks=1)
    out = tmp_path / "out"
    seen = []

    def progress(*_):
        if not seen:
            seen.append(1)
            with pytest.raises(MkgenError, match="another mkgen pack"):
                pack(plan, hub, out)
    pack(plan, hub, out, progress=progress)
    assert seen
    same(load_packed(out, 0).tape, load_packed(out, 0).tape)


def test_a_bad_weight_behind_an_interruption(tmp_path, monkeypatch, every_weight):
    """What was bad before the interruption is still bad after it, and in the end nothing is left."""
    plan, t, _ = make(tmp_path, ranks=1, fmt="bf16")
    first, last = next(n for n in t if "layers.0" in n and n.endswith("o_proj.weight")), [n for n in t if n.endswith("w2.weight")][-1]
    t[first][0, 0] = t[last][0, 0] = np.nan
    hub = checkpoint(tmp_path / "nan", t)
    stopped(monkeypatch, plan, hub, tmp_path / "out", len(list(write.units(plan))) - 6)
    with pytest.raises(MkgenError) as caught:
        pack(plan, hub, tmp_path / "out")
    assert first in str(caught.value) and last in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hub", "kimi_k3.yaml", "nan"]
