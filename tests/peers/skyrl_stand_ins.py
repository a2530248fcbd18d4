"""What SkyRL 0.3.0 imports at its top and a CPU has not: the padding functions of flash-attn, those of stand_ins.py."""

import sys
import typing
from importlib.machinery import ModuleSpec
from types import ModuleType

import typing_extensions
from stand_ins import pad_input, unpad_input
from transformers.utils import import_utils

for number in (2, 3, 4):  # transformers looks for them before another stands there
    getattr(import_utils, f"is_flash_attn_{number}_available")()

typing.TypedDict = typing_extensions.TypedDict  # pydantic asks for it before Python 3.12


for name in ("flash_attn", "flash_attn.bert_padding"):
    module = sys.modules[name] = ModuleType(name)
    module.__spec__, module.__path__ = ModuleSpec(name, None), []
sys.modules["flash_attn.bert_padding"].__dict__.update(pad_input=pad_input, unpad_input=unpad_input)
