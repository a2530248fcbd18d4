"""The start order of MindSpeed and MegatronAdaptor: stand-ins for both, Megatron and a bridge in processes of their own.

The stand-in patches as MindSpeed does (patch_utils.py:108-131): in the module, and under the same name wherever it is.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch import nn

import collate_npu
from collate_npu import ContextParallel, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations.megatron import gpt_batch
from collate_npu.masks import dense
from collate_npu.masks.forms import open_empty_rows

pytestmark = pytest.mark.slow

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
def rope(): ...
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
USER = {"user.py": "from collate_npu.integrations.verl import start_adaptor\nstart_adaptor()\n"}
BROKEN = {**USER, "mindspeed/megatron_adaptor.py": "raise ImportError('libhccl.so')"}
ADAPTOR = {
    "megatron_adaptor/patches/patch_manager.py": FILES["mindspeed/patch_utils.py"].replace("MindSpeedPatches", "Patches"),
    "megatron_adaptor/__init__.py": FILES["mindspeed/megatron_adaptor.py"]
    .replace("mindspeed.patch_utils", "megatron_adaptor.patches.patch_manager")
    .replace("MindSpeedPatches", "Patches"),
}
UNLISTED = {
    "megatron_adaptor/patches.py": "import megatron.core.attention as a\na.rope = lambda: 'on an NPU'",
    "megatron_adaptor/args.py": "",
    "megatron_adaptor/__init__.py": "from megatron_adaptor import args, patches",
}
FIRST = "`import {}` first, right after torch"
ASKED = """
import json, os, sys
from collate_npu.consumers.mindspeed import start_problem
for folder, imports in json.loads(sys.argv[1]):
    if pid := os.fork():
        os.waitpid(pid, 0)
        continue
    sys.path.insert(0, folder)
    for name in imports:
        __import__(name)
    print(json.dumps(start_problem()), flush=True)
    os._exit(0)
"""


OTHERS, WITHOUT = ("bridge", "aliasing", "deriving"), dict.fromkeys(name for name in FILES if "mindspeed" in name)
NEVER, LATE = "its adaptor has not run", "The adaptor of mindspeed ran too late: "
TOO = LATE.replace("mindspeed", "megatron_adaptor")
SAID = [
    ({}, ("mindspeed.megatron_adaptor", *OTHERS), ""),
    ({}, (), ""),
    (WITHOUT, ("bridge",), ""),
    (USER, ("user", *OTHERS), ""),
    (BROKEN, ("user",), ""),  # a driver without CANN goes on
    (BROKEN, ("user", "bridge"), NEVER),
    ({}, ("bridge",), NEVER),
    ({}, ("bridge", "mindspeed"), NEVER),  # the package alone patches nothing
    (
        {},
        ("bridge", "mindspeed.megatron_adaptor"),
        f"{LATE}megatron.core.extensions.transformer_engine found no transformer",
    ),
    ({}, ("aliasing", "mindspeed.megatron_adaptor"), f"{LATE}aliasing.their_rope holds the original of megatron.core.att"),
    ({}, ("deriving", "mindspeed.megatron_adaptor"), f"{LATE}deriving.Own holds the original of megatron.core.attention.A"),
    ({**WITHOUT, **ADAPTOR}, ("megatron_adaptor", *OTHERS), ""),
    ({**WITHOUT, **ADAPTOR, **USER}, ("user", *OTHERS), ""),
    ({**WITHOUT, **ADAPTOR}, ("bridge",), NEVER),
    ({**WITHOUT, **ADAPTOR}, ("aliasing", "megatron_adaptor"), f"{TOO}aliasing.their_rope holds the original of megatron.c"),
    ({**WITHOUT, **UNLISTED}, ("megatron_adaptor", *OTHERS), ""),
    ({**WITHOUT, **UNLISTED}, ("bridge", "megatron_adaptor"), NEVER),
    (ADAPTOR, ("megatron_adaptor", *OTHERS), ""),  # of two one suffices
    (ADAPTOR, ("mindspeed.megatron_adaptor", *OTHERS), ""),
    (ADAPTOR, ("bridge",), NEVER),
]
"""What differs in the files, what is imported in this order, and what `start_problem` says then."""


def test_what_is_wrong_with_the_start_is_said(tmp_path):
    for n, (changed, _, _) in enumerate(SAID):
        for name, text in {**FILES, **changed}.items():
            if text is not None:
                file = tmp_path / str(n) / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
    env = {**os.environ, "PYTHONPATH": str(Path(collate_npu.__file__).parents[1])}
    asked = json.dumps([(str(tmp_path / str(n)), imports) for n, (_, imports, _) in enumerate(SAID)])
    done = subprocess.run([sys.executable, "-c", ASKED, asked], capture_output=True, text=True, env=env, timeout=120)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(SAID), done.stderr
    for said, (files, imports, expected) in zip(found, SAID):
        first = FIRST.format("megatron_adaptor" if files.keys() >= WITHOUT.keys() else "mindspeed.megatron_adaptor")
        assert (expected in said and first in said) if expected else said == "", (imports, said)


def test_a_megatron_model_with_mindspeeds_attention_gets_what_that_reads():
    home = {"__name__": "mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention"}
    forward = FunctionType((lambda self: None).__code__, home)
    model = nn.Sequential(type("TEDotProductAttention", (nn.Module,), {"forward": forward})())
    model.config = SimpleNamespace(num_moe_experts=None, linear_attention_freq=None, use_flash_attn=True)

    def read(truth, kind):
        model.config.attention_mask_type = kind
        given = {"input_ids": truth.ids, "attention_mask_2d": truth.keep}
        return gpt_batch(given, model, context_parallel=ContextParallel(1, 0))[0]["attention_mask"]

    right, left = Segments.from_lengths([2, 4]), Segments.from_lengths([2, 4], side="left")
    assert torch.equal(read(right, "general"), dense(right, polarity="masked"))
    assert torch.equal(read(left, "general"), open_empty_rows(dense(left, polarity="masked")))
    assert read(right, "causal") is None
    with pytest.raises(UnsupportedFormError, match="compressed causal triangle"):
        read(left, "causal")
