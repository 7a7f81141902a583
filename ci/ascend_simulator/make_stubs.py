"""Build stand-ins for the CANN libraries that a torch_npu wheel links.

    python make_stubs.py SITE_PACKAGES OUT [--stubs-only]

SITE_PACKAGES holds both `torch` and `torch_npu`. OUT receives one tiny shared object per missing
library, and `libcann_stub.so`, which they all re-export and which defines

* every function that neither torch, torch_npu nor the C and C++ runtime provides, as a weak
  `int f(void) { return 0; }`, and every missing data symbol as zeros;
* unless `--stubs-only`: the simulated runtime (the `.cc` files beside this one), compiled with the
  headers that the wheel ships, so that signatures are checked; and a two-phase stand-in for every
  `aclnn*` operator named in the wheel, which fails, naming itself, where no kernel is simulated.

Use: LD_LIBRARY_PATH=OUT python -c "import torch, torch_npu"

Needs gcc, g++ and readelf. What did not change since the last build into OUT is kept.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

HERE = Path(__file__).parent
# Opened with dlopen, so that no DT_NEEDED entry names them.
OPENED_AT_RUN_TIME = [
    "libopapi.so",
    "libnnopbase.so",
    "libmsprofiler.so",
    "libruntime.so",
    "libascendcl.so",
    "libhccl.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_op_compiler.so",
    "libatb.so",
]


def output_of(*command: str) -> str:
    """Standard output of a command; on failure its complaint is shown."""
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def needed(library: Path) -> list[str]:
    """Sonames that a library links."""
    return re.findall(r"\(NEEDED\).*\[(.+?)\]", output_of("readelf", "-dW", str(library)))


def symbols(library: Path) -> tuple[dict[str, str], set[str]]:
    """Undefined names with their kind, and defined names."""
    undefined: dict[str, str] = {}
    defined: set[str] = set()
    for line in output_of("readelf", "--dyn-syms", "-W", str(library)).splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].rstrip(":").isdigit():
            continue
        kind, binding, section, name = fields[3], fields[4], fields[6], fields[7].split("@")[0]
        if section != "UND":
            defined.add(name)
        elif binding != "WEAK":
            undefined[name] = kind
    return undefined, defined


def missing_from(site: Path) -> tuple[dict[str, str], list[str]]:
    """Symbols and sonames that the wheel needs and nobody here provides."""
    npu_libraries = sorted((site / "torch_npu").rglob("*.so*"))
    torch_libraries = sorted((site / "torch" / "lib").glob("*.so*"))
    own = {path.name for path in npu_libraries + torch_libraries}
    system: dict[str, Path] = {}
    for match in re.finditer(
        r"^\s*(\S+) \(libc6,x86-64.*\) => (\S+)", output_of("/sbin/ldconfig", "-p"), re.MULTILINE
    ):
        system.setdefault(match[1], Path(match[2]))
    wanted: dict[str, str] = {}
    have: set[str] = set()
    absent: set[str] = set()
    providers = {system[name] for name in ("libstdc++.so.6", "libc.so.6") if name in system}
    for library in npu_libraries:
        undefined, defined = symbols(library)
        wanted.update(undefined)
        have |= defined
        for name in set(needed(library)) - own:
            if name in system:
                providers.add(system[name])
            else:
                absent.add(name)
    python = Path(sysconfig.get_config_var("LIBDIR") or "/") / (
        sysconfig.get_config_var("LDLIBRARY") or "none"
    )
    if python.suffix.startswith(".so") and python.exists():
        providers.add(python)
    for library in [*torch_libraries, *providers]:
        have |= symbols(library)[1]
    from_interpreter = re.compile(r"^_?Py|^_ITM_|^__gmon")
    return (
        {n: k for n, k in wanted.items() if n not in have and not from_interpreter.match(n)},
        sorted(absent),
    )


def named_in_wheel(site: Path, pattern: bytes) -> list[str]:
    """Names that libtorch_npu.so looks up by string."""
    text = (site / "torch_npu" / "lib" / "libtorch_npu.so").read_bytes()
    return sorted({match.decode() for match in re.findall(pattern, text)})


def stub_source(missing: dict[str, str]) -> str:
    """C source of weak stand-ins."""
    lines = []
    for index, (name, kind) in enumerate(sorted(missing.items())):
        if kind == "OBJECT" or name.startswith(("_ZTV", "_ZTI", "_ZTS", "_ZTT")):
            lines.append(f'char d{index}[256] __asm__("{name}") __attribute__((weak)) = {{0}};')
        else:
            lines.append(
                f'long f{index}(void) __asm__("{name}"); '
                f"__attribute__((weak)) long f{index}(void) {{ return 0; }}"
            )
    return "\n".join(lines) + "\n"


def operator_source(names: list[str], simulated: set[str]) -> str:
    """C source of the two phases of every operator; what is simulated is left to C++."""
    lines = ["int cann_stub_launch2(const char *op, void *exec, void *stream);"]
    for name in names:
        if f"{name}GetWorkspaceSize" not in simulated:
            lines.append(
                f"int {name}GetWorkspaceSize(void) {{ return 0; }}  /* executor stays null */"
            )
        if name in simulated:
            continue
        lines.append(
            f"int {name}(void *workspace, unsigned long size, void *exec, void *stream) "
            f'{{ (void)workspace; (void)size; return cann_stub_launch2("{name}", exec, stream); }}'
        )
    return "\n".join(lines) + "\n"


def digest_of(*parts: object) -> str:
    """A short hash of paths' contents and of other values' text."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.read_bytes() if isinstance(part, Path) else str(part).encode())
    return digest.hexdigest()[:16]


def wheels_of(site: Path) -> str:
    """The installed torch and torch_npu, with their versions."""
    return " ".join(sorted(path.name for path in site.glob("torch*-*.dist-info")))


def needs_of(site: Path, out: Path, stubs_only: bool) -> tuple[dict[str, str], list[str]]:
    """Missing symbols and sonames; scanned once per wheel."""
    cache = out / f"needs-{digest_of(wheels_of(site), stubs_only, Path(__file__))}.json"
    if not cache.exists():
        missing, sonames = missing_from(site)
        if not stubs_only:
            runtime = (
                rb"(?<=\x00)(acl(?:rt|mdlRI|mdl|sys|op|Get|Set|Create|Destroy)[A-Za-z0-9]+)(?=\x00)"
            )
            for name in named_in_wheel(site, runtime):
                missing.setdefault(name, "FUNC")
        cache.write_text(json.dumps([missing, sonames]))
    missing, sonames = json.loads(cache.read_text())
    return missing, sonames


def compiled(sources: list[Path], site: Path, out: Path) -> list[str]:
    """Object files of these sources; one that did not change is kept."""
    headers = sorted(HERE.glob("*.h"))
    includes = [site / "torch_npu" / "include", site / "torch" / "include"]
    system = [flag for path in includes for flag in ("-isystem", str(path))]
    objects, compilers = [], []
    for source in sources:
        mine = [header for header in headers if f'"{header.name}"' in source.read_text()]
        if mine and mine[0].name != "runtime.h":
            mine = headers
        target = out / f"{source.stem}-{digest_of(source, *mine, wheels_of(site))}.o"
        objects.append(str(target))
        if target.exists():
            continue
        for old in out.glob(f"{source.stem}-*.o"):
            old.unlink()
        command = ["gcc"] if source.suffix == ".c" else ["g++", "-std=c++20", *system]
        # Kernels are calls into PyTorch: optimising the callers would only cost compile time.
        command += ["-O0", "-fPIC", "-w", "-c", str(source), "-o", str(target)]
        compilers.append(subprocess.Popen(command))
    statuses = [compiler.wait() for compiler in compilers]
    if any(statuses):
        sys.exit("the simulator does not compile")
    return objects


def build(site: Path, out: Path, stubs_only: bool) -> str:
    """Build everything into `out`; returns a line that says what was built."""
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    missing, sonames = needs_of(site, out, stubs_only)
    (out / "stub.c").write_text(stub_source(missing))
    sources, link, loose = [out / "stub.c"], [], []
    if not stubs_only:
        sources += sorted(HERE.glob("*.cc"))
        torch_library = str(site / "torch" / "lib")
        link = ["-L", torch_library, "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_library}"]
        loose = ["-L", torch_library, "-Wl,--allow-shlib-undefined"]
    objects = compiled(sources, site, out)
    core = out / "libcann_stub.so"
    shared = ["g++", "-shared", "-Wl,-soname,libcann_stub.so", "-o", str(core)]
    output_of(*shared, *objects, *link, "-lpthread")
    operators: list[str] = []
    if not stubs_only:
        phases = named_in_wheel(
            site, rb"(?<![A-Za-z0-9_])(acl(?:nn[A-Z][A-Za-z0-9_]*|Rfft1D|Stft))(?=\x00)"
        )
        names = sorted({name.removesuffix("GetWorkspaceSize") for name in phases})
        (out / "ops.c").write_text(operator_source(names, symbols(core)[1]))
        operators = compiled([out / "ops.c"], site, out)
    (out / "empty.c").write_text("")
    for soname in sorted(set(sonames) | set(OPENED_AT_RUN_TIME)):
        if stubs_only and soname in {"libopapi.so", "libnnopbase.so"}:
            continue
        forward = ["gcc", "-shared", f"-Wl,-soname,{soname}", "-Wl,--no-as-needed"]
        forward += ["-Wl,-rpath,$ORIGIN", "-o", str(out / soname), str(out / "empty.c")]
        forward += operators if soname == "libopapi.so" else []
        output_of(*forward, "-L", str(out), "-lcann_stub", *loose)
    seconds = time.monotonic() - start
    return f"{len(missing)} missing symbols in {len(sonames)} libraries, built in {seconds:.0f} s"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stubs-only", action="store_true")
    options = parser.parse_args()
    if (options.site / "torch" / "lib" / "libtorch_cuda.so").exists():
        sys.exit(
            f"error: the torch in {options.site} is a CUDA build, beside which torch_npu ends the "
            "process as soon as torch is imported; install the CPU build of the same version"
        )
    sources = sorted(path for path in HERE.iterdir() if path.suffix in {".py", ".cc", ".h"})
    mine = digest_of(*sources, wheels_of(options.site), options.stubs_only)
    mark = options.out / "built_from"
    if mark.exists() and mark.read_text() == mine:
        print("unchanged, kept")
        return
    print(build(options.site, options.out, options.stubs_only))
    mark.write_text(mine)


if __name__ == "__main__":
    main()
