"""Compile the stand-in, once for each release of PyTorch and each change of its source.

``python tests/standin/build.py`` prints the folder that has to be on PYTHONPATH, or says in one
sentence why there is none, and ends with 1. It wants g++ (12 or newer) and the CPU's build of the
release of PyTorch that constraints.txt names, whose inner interfaces the stand-in is written for.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(sys.prefix) / "standin"
"""In the environment of the PyTorch that it is built for, and gone with that."""
ENTRY = {
    "METADATA": "Metadata-Version: 2.1\nName: standin\nVersion: 0\n",
    "entry_points.txt": "[torch.backends]\nstandin = standin:load\n",
}


def refusal() -> str | None:
    """Return why the stand-in cannot be built here."""
    found, wanted = (
        version("torch"),
        re.search(r"^torch==(\S+)", (HERE.parents[1] / "constraints.txt").read_text(), re.M)[1],
    )
    if found.split("+")[0] != wanted:
        return f"the stand-in GPU is written for PyTorch {wanted}, and this is {found}"
    if list((_torch() / "lib").glob("libtorch_cuda*")):
        return f"PyTorch {found} is built for real GPUs, and the stand-in GPU for the CPU's build"
    if shutil.which("g++") is None:
        return "g++ is missing, which builds the stand-in GPU"
    return None


def _torch() -> Path:
    return Path(find_spec("torch").origin).parent  # without importing it


def built() -> Path:
    """Return the folder with the stand-in of this source, compiled if it is not there yet (half a
    minute, 3 GB of memory).
    """
    library = (
        CACHE
        / f"{version('torch')}-{sys.implementation.cache_tag}-{_digest(*HERE.glob('*.cpp'), HERE / 'standin.h')}.so"  # noqa: E501
    )
    folder = library.with_name(f"{library.stem}-{_digest(HERE / 'standin.py', Path(__file__))}")
    if folder.is_dir():
        return folder
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as made:  # what is under its name is whole
        if not library.exists():
            _compile(Path(made) / library.name)
            (Path(made) / library.name).replace(library)
        half = Path(made) / folder.name
        entry = half / "standin-0.dist-info"
        entry.mkdir(parents=True)
        for name, text in ENTRY.items():
            (entry / name).write_text(text)
        shutil.copy(HERE / "standin.py", half)
        # Beside it, so that it is found by whatever path this environment is.
        (half / "_standin.so").symlink_to(Path("..", library.name))
        try:
            half.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:12]


def _compile(library: Path) -> None:
    torch = _torch()
    folders = [
        HERE,
        torch / "include",
        torch / "include/torch/csrc/api/include",
        sysconfig.get_paths()["include"],
    ]
    flags = [
        "-O1",
        "-fPIC",
        "-shared",
        "-std=c++20",
        "-w",
        "-DTORCH_EXTENSION_NAME=_standin",
        *(f"-I{it}" for it in folders),
    ]
    libraries = [
        f"-L{torch / 'lib'}",
        f"-Wl,-rpath,{torch / 'lib'}",
        "-ltorch",
        "-ltorch_cpu",
        "-ltorch_python",
        "-lc10",
    ]
    # As one source: most of the time goes into PyTorch's headers.
    source = "".join(f'#include "{part.name}"\n' for part in sorted(HERE.glob("*.cpp")))
    command = ["g++", *flags, "-x", "c++", "-", "-x", "none", "-o", library, *libraries]
    if subprocess.run(command, input=source, text=True, check=False).returncode:
        sys.exit("without the stand-in GPU: g++ could not compile it, see above")


if __name__ == "__main__":
    if (why := refusal()) is not None:
        sys.exit(f"without the stand-in GPU: {why}")
    print(built())
