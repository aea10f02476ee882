"""kimi_k3: one decode step as one Pallas program (see host.py)."""

from .host import PLAN, SPEC, abstract_args, init_state, load_weights  # noqa: F401
from .host import make_decode_step, make_mesh, reset_row, weight_shapes, whole_logits  # noqa: F401
