"""What the driver says, from a driver that this test compiles; and which machines are refused."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dgcompile import gpu
from dgcompile.errors import BundleError, MissingDependencyError
from dgcompile.gpu import Card, Gpus, check_gpu, import_library, query_gpus

SOURCE = """
#include <string.h>
#define EXPORT __attribute__((visibility("default")))
static int initialised = 0;
EXPORT int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
EXPORT int cuInit(unsigned flags) { initialised = INIT == 0 && flags == 0; return INIT; }
EXPORT int cuDeviceGetCount(int *count) { *count = COUNT; return initialised ? 0 : 3; }
EXPORT int cuDeviceGet(int *device, int index) { *device = 70 + index; return index < COUNT ? 0 : 101; }
EXPORT int cuDeviceGetName(char *name, int size, int device) {
    strncpy(name, device == 70 ? "First GPU" : "Second GPU", size);
    return device < 70;
}
EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(device - 69) << 33; return 0; }
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 16 ? device + 100 : attribute == 75 ? (device == 70 ? 9 : 12) : attribute == 76 ? 0 : -1;
    return device < 70;
}
EXPORT int cuGetErrorName(int code, const char **name) { *name = code == 999 ? "CUDA_ERROR_UNKNOWN" : 0; return 0; }
"""

CARD = Card(0, "NVIDIA GeForce RTX 5090", "12.0", 32 << 30, 170)
MACHINE = Gpus((13, 0), "580.65.06", (CARD,), None)


@pytest.fixture
def driver(tmp_path: Path):
    """Compiles a driver: cuInit's result, number of GPUs, version."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")

    def compiled(init: int = 0, count: int = 2, version: int = 13010) -> str:
        source, library = tmp_path / "driver.c", tmp_path / f"driver-{init}-{count}-{version}.so"
        source.write_text(SOURCE)
        facts = [f"-DINIT={init}", f"-DCOUNT={count}", f"-DVERSION={version}"]
        subprocess.run(["cc", "-shared", "-fPIC", *facts, "-o", str(library), str(source)], check=True)
        return str(library)

    return compiled


def test_the_driver_is_asked(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_driver_version", lambda: "590.1")
    first = Card(0, "First GPU", "9.0", 8 << 30, 170)
    second = Card(1, "Second GPU", "12.0", 16 << 30, 171)
    found = query_gpus(driver())
    assert found == Gpus((13, 1), "590.1", (first, second), None)
    assert check_gpu("12.0", "tensorrt_rtx", found) == second
    assert check_gpu("9.0", "tensorrt", found) == first


def test_no_driver_and_no_gpu_are_answers(driver, tmp_path: Path) -> None:
    missing = query_gpus(str(tmp_path / "none.so"))
    assert (missing.driver_cuda, missing.cards) == (None, ())
    assert missing.problem is not None and "no NVIDIA driver" in missing.problem
    for found in (query_gpus(driver(init=100)), query_gpus(driver(count=0))):
        assert (found.driver_cuda, found.cards) == ((13, 1), ())
        assert found.problem == "this machine has an NVIDIA driver but no GPU"
    broken = query_gpus(driver(init=999))
    assert broken.problem == "NVIDIA driver: cuInit failed with CUDA_ERROR_UNKNOWN"
    assert query_gpus(driver(init=5)).problem == "NVIDIA driver: cuInit failed with error 5"


def test_another_library_of_that_name_is_no_driver() -> None:
    found = query_gpus("libc.so.6")
    assert found.cards == ()
    assert found.problem is not None and found.problem.startswith("libc.so.6 is no NVIDIA driver")


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (query_gpus("no-such-library.so"), "no NVIDIA driver.*expected a GPU of compute capability 12.0; install the"),
        (Gpus((13, 0), None, (), "no GPU at all"), "no GPU at all; expected a GPU of compute capability 12.0$"),
        (
            replace(MACHINE, cards=(replace(CARD, name="NVIDIA H100", compute_capability="9.0"),)),
            r"this machine has NVIDIA H100 \(9.0\); expected a GPU of compute capability 12.0; build the checkpoint",
        ),
        (
            replace(MACHINE, driver_cuda=(12, 9), driver_version="575.51"),
            r"driver 575.51 offers CUDA 12.9; expected CUDA 13.0 or newer for tensorrt_rtx; update the driver to 580",
        ),
    ],
)
def test_machines_that_cannot_run_a_bundle_are_refused_in_one_line(gpus: Gpus, message: str) -> None:
    with pytest.raises(BundleError, match=message) as refused:
        check_gpu("12.0", "tensorrt_rtx", gpus)
    assert "\n" not in str(refused.value)
    assert check_gpu("12.0", "tensorrt_rtx", MACHINE) == CARD


def test_the_drivers_own_version(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert gpu._driver_version(file) is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\nGCC 12.3.0")
    assert gpu._driver_version(file) == "580.82.07"


def test_engine_libraries_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def imported(name: str) -> SimpleNamespace:
        if name == "tensorrt":
            raise ModuleNotFoundError("No module named 'tensorrt'")
        return SimpleNamespace(__version__="1.7.1.116")

    monkeypatch.setattr(gpu, "import_module", imported)
    assert import_library("tensorrt_rtx").__version__ == "1.7.1.116"
    assert import_library("tensorrt_rtx", "1.7.1.116").__version__ == "1.7.1.116"
    with pytest.raises(BundleError, match=r"has tensorrt_rtx 1.7.1.116; expected 1.6.0, which built the engines"):
        import_library("tensorrt_rtx", "1.6.0")
    with pytest.raises(MissingDependencyError, match=r"pip install 'dgcompile\[h100\]'"):
        import_library("tensorrt", "11.4.0.106")
