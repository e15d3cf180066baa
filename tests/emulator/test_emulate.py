"""`python -m rec_sdk_torch.emulate` runs unmodified programs on the EMULATED NPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rec_sdk_torch import emulate
from rec_sdk_torch.runtime import emulator

CANN = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
SETTINGS = (
    "REC_SDK_EMULATED_DEVICES",
    "REC_SDK_EMULATED_SOC",
    "REC_SDK_EMULATED_MEMORY",
    "REC_SDK_EMULATED_STREAMS",
)


def run(
    *arguments: str | Path, bare: bool = False, flags: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs the launcher in an environment without its settings; with `bare`, runs python without the launcher."""
    unset = {"LD_LIBRARY_PATH", *CANN, *SETTINGS}
    environment = {name: value for name, value in os.environ.items() if name not in unset} | variables
    environment["PYTHONPATH"] = str(Path(emulate.__file__).parents[1])
    command = [sys.executable, *flags, *([] if bare else ["-m", "rec_sdk_torch.emulate"]), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


# ---------------------------------------------------------------- programs


PROGRAM = """
import sys, os, torch, torch.multiprocessing as mp, neighbour
from rec_sdk_torch import emulate
def work(rank):
    torch.npu.set_device(2)
    print("child", rank, torch.ones(2, device="npu").sum())
if __name__ == "__main__":
    x = torch.full((3,), float(neighbour.VALUE), device="npu")
    print("program", sys.argv[1:], (x + 1).sum().item(), emulate.active())
    print("devices", torch.npu.device_count(), torch.npu.mem_get_info()[1] >> 20, os.environ["REC_SDK_EMULATED_SOC"])
    try:
        torch.empty(200 << 20, device="npu")
    except torch.OutOfMemoryError:
        print("out of memory")
    mp.spawn(work, nprocs=1)
    sys.exit(3)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Runs one program for all checks, since each import of torch takes seconds."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "neighbour.py").write_text("VALUE = 20\n")
    (folder / "script.py").write_text(PROGRAM)
    options = ("--devices", "3", "--memory", "128M", "--soc", "Ascend910B3")
    return run(*options, folder / "script.py", "--devices", "a b", "-m")


def test_an_unmodified_program(program: subprocess.CompletedProcess[str]) -> None:
    """`import torch` alone loads torch_npu; arguments, exit code, sys.argv and sys.path are the program's own."""
    assert "program ['--devices', 'a b', '-m'] 63.0 True" in program.stdout.splitlines(), program.stderr
    assert program.returncode == 3


def test_options_set_up_the_devices(program: subprocess.CompletedProcess[str]) -> None:
    lines = program.stdout.splitlines()
    assert "devices 3 128 Ascend910B3" in lines, program.stderr
    assert "out of memory" in lines


def test_child_processes(program: subprocess.CompletedProcess[str]) -> None:
    assert "child 0 tensor(2., device='npu:2')" in program.stdout.splitlines(), program.stderr


def test_a_program_that_imports_torch_npu_itself(script: Path) -> None:
    script.write_text("import torch\nimport torch_npu\nprint(torch.ones(2).npu().device)\n")
    finished = run(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert finished.stdout.splitlines()[-1] == "npu:0", finished.stderr


def test_modules_and_flags_of_python() -> None:
    finished = run(
        "-m", "timeit", "-n1", "-r1", "import sys; print(sys.flags.utf8_mode, sys.argv)", flags=("-X", "utf8")
    )
    assert finished.stdout.startswith("1 "), finished.stderr


@pytest.mark.parametrize("flags", [("-Bm", "rec_sdk_torch.emulate"), ("-mrec_sdk_torch.emulate",)])
def test_other_forms_of_the_command(flags: tuple[str, ...]) -> None:
    finished = run("-m", "timeit", "-n1", "-r1", "import sys; print('ran', sys.argv)", bare=True, flags=flags)
    assert finished.stdout.startswith("ran"), finished.stderr


def test_torchrun(script: Path) -> None:
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('hccl')\n"
        "torch.npu.set_device(dist.get_rank())\n"
        "x = torch.ones(2, device='npu') * (dist.get_rank() + 1)\n"
        "dist.all_reduce(x)\n"
        # A single write, because torchrun runs Python unbuffered, and print would write each argument separately.
        "os.write(1, f'sum {x.tolist()}\\n'.encode())\n"
        "dist.destroy_process_group()\n"
    )
    finished = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    assert finished.stdout.count("sum [3.0, 3.0]") == 2, finished.stderr


def test_the_library_path_alone_is_enough(script: Path) -> None:
    script.write_text("import torch\nprint(torch.ones(2, device='npu').sum().item())\n")
    library = run("--lib")
    assert (library.returncode, library.stdout) == (0, f"{emulate.library_directory()}\n")
    finished = run(script, bare=True, LD_LIBRARY_PATH=library.stdout.strip())
    assert finished.stdout.splitlines()[-1] == "2.0", finished.stderr


def test_an_existing_library_path_is_kept(script: Path) -> None:
    script.write_text("import os\nprint(os.environ['LD_LIBRARY_PATH'])\n")
    finished = run(script, LD_LIBRARY_PATH="/a:/b")
    assert finished.stdout == f"{emulate.library_directory()}:/a:/b\n"


def test_the_emulator_is_inactive_without_the_launcher() -> None:
    finished = run(
        "-c",
        "from rec_sdk_torch import emulate; import sys; print(emulate.active(), 'torch' in sys.modules)",
        bare=True,
    )
    assert finished.stdout == "False False\n"


# ---------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a program to run"),
        (["missing.py"], "there is no file 'missing.py'; to run a module, put -m before it"),
        (["--lib", "program.py"], "--lib takes no program"),
        (["--devices", "0", "program.py"], "'0' is not allowed; it must be a number from 1 to 64"),
        (["--devices", "x", "program.py"], "'x' is not allowed"),
        (["--memory", "16Q", "program.py"], "'16Q' is not allowed; it must be 1M to 1024G, as bytes or with K, M or G"),
        (["--memory", "0", "program.py"], "'0' is not allowed"),
        (["--streams", "lately", "program.py"], "'lately' is not allowed; it must be eager, late, or random:SEED with"),
        (["--streams", "random", "program.py"], "'random' is not allowed"),
        (["--streams", f"random:{1 << 64}", "program.py"], "is not allowed"),
        (["--device", "2", "program.py"], "--device"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    finished = run(*arguments)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert message in finished.stderr.splitlines()[-1]


def refused(finished: subprocess.CompletedProcess[str]) -> str:
    assert (finished.returncode, finished.stdout) == (2, "")
    (line,) = finished.stderr.splitlines()
    assert line.startswith("rec_sdk_torch.emulate: ")
    return line


@pytest.mark.parametrize("variable", CANN)
def test_a_real_cann_is_refused_unless_forced(script: Path, variable: str) -> None:
    script.write_text(f"import os\nprint(os.environ.get('{variable}'))\n")
    line = refused(run(script, **{variable: "/usr/local/Ascend"}))
    assert f"{variable}=/usr/local/Ascend" in line
    assert "--force" in line
    forced = run("--force", script, **{variable: "/usr/local/Ascend"})
    assert (forced.returncode, forced.stdout) == (0, "None\n")


def test_a_real_cann_known_to_the_linker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "\tlibascendcl.so (libc6,x86-64) => /usr/lib64/libascendcl.so\n"
    for variable in CANN:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(
        emulator.subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, 0, stdout=listing)
    )
    with pytest.raises(emulate.EmulatorUnavailableError, match=r"installed .*/usr/lib64/libascendcl"):
        emulate.check()
    assert emulate.check(force=True) == emulate.library_directory()


def test_a_missing_build_of_the_emulator_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emulator, "library_directory", lambda: tmp_path)
    assert emulate.main(["--lib"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"not built: {tmp_path}/libascendcl.so is missing" in captured.err
    assert captured.err.count("\n") == 1


def test_torch_npu_not_installed(script: Path) -> None:
    """Without site-packages, torch_npu cannot be found."""
    script.write_text("")
    line = refused(run(script, flags=("-S",)))
    assert "torch_npu is not installed" in line
    assert "pip install" not in line  # it would break `import torch` in that environment
