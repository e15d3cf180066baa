"""The build of the kernels for an NPU, with a stand-in for CANN: what its compiler is called with, and that what
starts the kernels compiles."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch_npu

ROOT = Path(__file__).resolve().parents[2]
CANN = Path(__file__).with_name("cann")


def test_kernels_for_an_npu(tmp_path: Path) -> None:
    log = tmp_path / "bisheng.log"
    headers = Path(torch_npu.__file__).parent / "include/third_party/acl/inc"
    environment = {**os.environ, "REC_SDK_BISHENG_LOG": str(log), "REC_SDK_ACL_HEADERS": str(headers)}
    configure = ["cmake", "-S", str(ROOT / "op_kernels/ascendc"), "-B", str(tmp_path / "build"), f"-DASC_DIR={CANN}"]
    for command in (configure, ["cmake", "--build", str(tmp_path / "build")]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    compiled = [line.split() for line in log.read_text().splitlines() if " -c " in line]
    sources = {Path(call[-1]).relative_to(ROOT).as_posix() for call in compiled}
    kernels = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("op_kernels/*/ascendc.asc")}
    assert sources == {*kernels, "op_kernels/ascendc/runtime.asc"}
    assert len(kernels) == 8
    for call in compiled:
        # With the compiler's own barriers and waits, each row's copy could wait for the last one's.
        assert "--cce-auto-sync=off" in call
        assert "--npu-arch=dav-2201" in call
        assert "-ffp-contract=off" in call
