"""For ms-swift's `--external_plugins`: pass the path of this file, and `install()` runs in the trainer and its workers.

ms-swift runs it under a name of its own in every spawned process too (4.6.0 swift/utils/utils.py:409-429).
"""

from __future__ import annotations

import os
import sys

if __name__.startswith("_swift_external_"):
    # swift put this folder first on sys.path, and does so again before it looks for a module that it has run already:
    # neither the folder nor this module must be found under a bare name.
    _here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _here]
    del sys.modules[__name__]
    from collate_npu.integrations import swift

    swift.install(trainers="swift.megatron" in sys.modules)
