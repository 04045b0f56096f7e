"""What benchmarks.stalls reads in the tables of Nsight Compute."""

import subprocess
from types import SimpleNamespace

import pytest

from benchmarks import stalls

PLACE = '"Address","Source","Warp Stall Sampling (All Samples)"'
SOURCE = f"""==PROF== connected
"Kernel Name","first_kernel",
{PLACE},"stall_wait","stall_long_sb"
"0x0","      LDG.E  R2, desc[UR4][R2.64]","10","10","0"
"0x10","      FADD R2, R2, R3","90","0","90"
"Kernel Name","second_kernel",
{PLACE},"stall_long_sb","stall_wait","stall_x (Not Issued)"
"0x0","      EXIT","4","1","3","9"
"""
DETAILS = """  first_kernel (256, 32, 1)x(128, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Section: GPU Speed Of Light Throughput
    DRAM Throughput                   %        45.56
    Duration                         us       437.60
    Registers Per Thread             register/thread               168
  second_kernel (1, 1, 1)x(32, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Duration                         ms         1.09
"""


def test_stalls_of_each_kernel_by_its_own_columns():
    (first, one), (second, two) = stalls.kernels_in(SOURCE)
    assert (first, second) == ("first_kernel", "second_kernel")
    assert stalls.shares(one) == {"long_sb": 0.9, "wait": 0.1}
    assert stalls.shares(two) == {"wait": 0.75, "long_sb": 0.25}
    assert [(x.number, x.text) for x in one] == [
        (0, "LDG.E R2, desc[UR4][R2.64]"),
        (1, "FADD R2, R2, R3"),
    ]


def test_what_is_printed(monkeypatch, capsys, tmp_path):
    ran = []

    def run(command, **options):
        ran.append(command)
        page = command[command.index("--page") + 1] if "--page" in command else ""
        text = {"source": SOURCE, "details": DETAILS, "": ""}[page]
        return SimpleNamespace(returncode=0, stdout=text, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(stalls.shutil, "which", lambda name: name)
    stalls.main(["--op", "gdn", "--shape", "64x2", "--top", "1", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    facts = "DRAM Throughput 45.56 %, Duration 437.60 us, Registers Per Thread 168 register/thread"
    assert lines == [
        f"first_kernel: {facts}",
        "  2 instructions; long_sb 90%, wait 10%",
        "      1  90.0% long_sb      FADD R2, R2, R3",
        "second_kernel: Duration 1.09 ms",
        "  1 instructions; wait 75%, long_sb 25%",
        "      0 100.0% wait         EXIT",
    ]
    assert "--child" in ran[0] and len(ran) == 3
    assert (tmp_path / "source.csv").read_text() == SOURCE


def test_a_failure_of_ncu_is_shown(monkeypatch, tmp_path):
    monkeypatch.setattr(stalls.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="not in PATH"):
        stalls.profiled("kda", "64x2", ".*", tmp_path)
    monkeypatch.setattr(stalls.shutil, "which", lambda name: name)
    failed = SimpleNamespace(returncode=1, stdout="", stderr="no permission")
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: failed)
    with pytest.raises(SystemExit, match="no permission"):
        stalls.profiled("kda", "64x2", ".*", tmp_path)
