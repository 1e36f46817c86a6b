"""What is called before the process groups end."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch.distributed as dist
from fxshard._torch import before_groups_end

def told():
    print("told")

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
before_groups_end(told)
before_groups_end(told)
if sys.argv[1] == "destroy":
    dist.destroy_process_group()
print("end")
"""


@pytest.mark.parametrize(("end", "expected"), [("destroy", ["told", "end", "told"]), ("leave", ["end", "told"])])
def test_it_is_called_before_groups_end_and_before_python_does(end: str, expected: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, end], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.split() == expected
