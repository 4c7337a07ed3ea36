"""thunder's own tests, run with hookkit enabled, in the short form of scripts/peer_tests.py."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "peer_tests.py"


@pytest.mark.long
def test_thunders_tests_of_custom_functions_operators_and_checkpointing_pass_with_hookkit():
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--short"]
    done = subprocess.run(command, cwd=SCRIPT.parent.parent, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    summary = next(line for line in done.stdout.splitlines() if "fail and are listed" in line)
    assert int(summary.split()[0]) >= 80, summary
