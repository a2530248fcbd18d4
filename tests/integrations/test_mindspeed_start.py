"""MindSpeed's start order, with stand-ins for MindSpeed, Megatron and a bridge in processes of their own.

The stand-in patches as MindSpeed does (patch_utils.py:108-131): in the module, and under the same name wherever it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch import nn

import collate_npu
from collate_npu import ContextParallel, Segments, UnsupportedFormError, dense
from collate_npu.integrations.megatron import gpt_batch
from collate_npu.integrations.mindspeed import start_problem
from collate_npu.masks.forms import open_empty_rows

FILES = {
    "mindspeed/__init__.py": "",
    "mindspeed/patch_utils.py": """
import importlib, sys
class Patch:
    def __init__(self, name, new):
        self.module, self.name = name.rsplit(".", 1)
        self.patch_func, self.orig_func, self.final_patch_func, self.is_applied = new, None, None, False
    def apply_patch(self):
        module = importlib.import_module(self.module)
        self.orig_func, self.final_patch_func = getattr(module, self.name, None), self.patch_func
        for one in [module, *list(sys.modules.values())]:
            if getattr(one, self.name, None) is self.orig_func and (one is module or self.orig_func):
                setattr(one, self.name, self.patch_func)
        self.is_applied = True
class MindSpeedPatchesManager:
    patches_info = {}
""",
    "mindspeed/megatron_adaptor.py": """
import sys, types
from mindspeed.patch_utils import MindSpeedPatchesManager, Patch
sys.modules.setdefault("transformer_engine", types.ModuleType("transformer_engine"))
def rope(): return "on an NPU"
def compiled(): ...
class Attention: ...
names = {"megatron.core.attention.rope": rope, "megatron.core.attention.Attention": Attention}
for name, new in {**names, "colorsys.rgb_to_hsv": compiled}.items():
    MindSpeedPatchesManager.patches_info[name] = Patch(name, new)
    MindSpeedPatchesManager.patches_info[name].apply_patch()
""",
    "megatron/core/__init__.py": "",
    "megatron/core/attention.py": "def rope(): return 'on a GPU'\nclass Attention: ...\nclass Cross(Attention): ...\n",
    "megatron/core/extensions/transformer_engine.py": """
try:
    import transformer_engine
    HAVE_TE = True
except ImportError:
    HAVE_TE = False
""",
    "bridge.py": """
import megatron.core.extensions.transformer_engine
from colorsys import rgb_to_hsv as elsewhere
from megatron.core.attention import Attention, rope
""",
    "aliasing.py": "from megatron.core.attention import rope as their_rope\n",
    "deriving.py": "import megatron.core.attention as theirs\nclass Own(theirs.Attention): ...\n",
}
FIRST = "`import mindspeed.megatron_adaptor` first, right after torch"


@pytest.fixture
def start(tmp_path):
    """What `start_problem` says after these imports, and after the same once more."""
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run(*imports, without_mindspeed=False):
        if without_mindspeed:
            (tmp_path / "mindspeed").rename(tmp_path / "gone")
        code = f"for name in {imports!r}: __import__(name)\n"
        code += "from collate_npu.integrations.mindspeed import start_problem\nprint(start_problem())"
        path = os.pathsep.join([str(tmp_path), str(Path(collate_npu.__file__).parents[1])])
        env = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_the_adaptor_first_is_right(start):
    assert start("mindspeed.megatron_adaptor", "bridge", "aliasing", "deriving") == ""


def test_nothing_is_wrong_before_megatron_or_without_mindspeed(start):
    assert start() == ""
    assert start("bridge", without_mindspeed=True) == ""
    assert start_problem() == ""


def test_start_lets_the_adaptor_patch_first(start, tmp_path):
    (tmp_path / "user.py").write_text("from collate_npu.integrations.mindspeed import start\nstart()\n")
    assert start("user", "bridge", "aliasing", "deriving") == ""
    (tmp_path / "mindspeed" / "megatron_adaptor.py").write_text("raise ImportError('libhccl.so')")
    assert start("user") == "", "a driver without CANN goes on"
    assert "its adaptor has not run" in start("user", "bridge")


def test_an_adaptor_that_never_ran(start):
    said = start("bridge")
    assert "its adaptor has not run" in said
    assert FIRST in said
    assert start("bridge", "mindspeed") == said, "the package alone patches nothing"


@pytest.mark.parametrize(
    ("early", "found"),
    [
        ("bridge", "megatron.core.extensions.transformer_engine found no transformer_engine"),
        ("aliasing", "aliasing.their_rope holds the original of megatron.core.attention.rope"),
        ("deriving", "deriving.Own holds the original of megatron.core.attention.Attention"),
    ],
)
def test_what_was_taken_before_the_adaptor_is_named(start, early, found):
    said = start(early, "mindspeed.megatron_adaptor")
    assert said.startswith(f"MindSpeed's adaptor ran too late: {found}.")
    assert FIRST in said


@pytest.mark.parametrize("mask_type", ["causal", "general"])
def test_a_megatron_model_with_mindspeeds_attention_gets_what_that_reads(mask_type):
    home = {"__name__": "mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention"}
    forward = FunctionType((lambda self: None).__code__, home)
    model = nn.Sequential(type("TEDotProductAttention", (nn.Module,), {"forward": forward})())
    model.config = SimpleNamespace(
        num_moe_experts=None, linear_attention_freq=None, attention_mask_type=mask_type, use_flash_attn=True
    )

    def batch(truth):
        given = {"input_ids": truth.ids, "attention_mask_2d": truth.keep}
        return gpt_batch(given, model, context_parallel=ContextParallel(1, 0))[0]["attention_mask"]

    right, left = Segments.from_lengths([2, 4]), Segments.from_lengths([2, 4], side="left")
    if mask_type == "general":
        assert torch.equal(batch(right), dense(right, polarity="masked"))
        assert torch.equal(batch(left), open_empty_rows(dense(left, polarity="masked")))
        return
    assert batch(right) is None
    with pytest.raises(UnsupportedFormError, match="compressed causal triangle"):
        batch(left)
