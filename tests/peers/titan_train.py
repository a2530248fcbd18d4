"""`python titan_train.py --module ... --config ...`: `python -m torchtitan.train` on a CPU."""

import titan_cpu  # noqa: F401
from torchtitan.train import main

if __name__ == "__main__":
    main()
