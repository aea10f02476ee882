"""The environment of every test, set before anything imports jax, and the plans of the committed specs."""
import os

# NPROC sizes the pool that interpreted kernels run on: one thread a device must be able to wait. Eight virtual devices;
# bf16 is rounded where the program says so, not where XLA finds it convenient. No test needs a TPU, none looks for one.
os.environ.update(
    NPROC="64",
    JAX_PLATFORMS="cpu",
    XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_allow_excess_precision=false",
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


def plan_of(name: str):
    """The plan of a committed spec, as it stands in its file."""
    from mkgen.graph.build import build_graph
    from mkgen.plan.planner import make_plan
    from mkgen.spec.load import load_spec
    from mkgen.targets import load_target

    spec = load_spec(ROOT / "model_specs" / f"{name}.yaml")
    return make_plan(spec, build_graph(spec), load_target(spec.build.chip))


@pytest.fixture(scope="session")
def qwen_plan():
    """Full size, one host of eight cores."""
    return plan_of("qwen3_30b_a3b")


@pytest.fixture(scope="session")
def kimi_plan():
    """Full size, 32 cores."""
    return plan_of("kimi_k3")
