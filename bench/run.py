"""Runs us, Gloo and Open MPI in turn, and the limits beside them, and reports.

    bench/run.py            everything; writes docs/benchmarks.{json,md} and docs/img/benchmarks.svg
    bench/run.py --quick    a minute: results are checked, ratios are printed, nothing is written

Each repetition runs every contestant on every size, so that what disturbs the machine disturbs all of them. A rank
rewrites its whole buffer, waits at a barrier, makes the timed call and waits again, so that no rank's rewriting keeps
another that shares its core from seeing the end of the call; the slowest rank's time counts. A time is the
median over the calls of a repetition, then over repetitions; a ratio is taken within a repetition, then the median.
"""

import argparse
import atexit
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import hosts
import report
from hosts import ADDRESSES, Command, Failed, Hosts

HERE = Path(__file__).resolve().parent
SIZES = [4 << shift for shift in range(0, 27, 2)]
QUICK_SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 16 << 20]
MIB = 1 << 20
# A thousand tensors of a kibibyte.
THOUSAND = 1000 << 10


@dataclass(frozen=True)
class Case:
    """One arrangement of ranks, and who runs in it."""

    ranks: int
    contestants: tuple[str, ...]
    hosts: int = 1
    rate: str | None = None
    sizes: tuple[int, ...] = ()
    # Whose sizes are fewer.
    only: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def host(self, rank: int) -> int:
        """Where a rank runs: hosts have equally many, in the order of their ranks."""
        return rank * self.hosts // self.ranks


# Who is compared runs side by side.
ONE_HOST = ("gloo", "openmpi", "plain", "registered", "loop")
CASES = {
    "host2": Case(2, ONE_HOST),
    "host4": Case(4, ONE_HOST),
    "host8": Case(8, ONE_HOST),
    "host16": Case(16, ONE_HOST),
    "net": Case(2, ("gloo", "openmpi", "tcp", "raw-tcp", "raw-tls", "tls"), hosts=2),
    "net4": Case(4, ("gloo", "openmpi", "plain", "flat", "registered"), hosts=2),
    "gbit": Case(2, ("tcp", "tls", "raw-tcp"), hosts=2, rate="1gbit", sizes=(MIB, 16 * MIB)),
    "engine": Case(
        2,
        ("plain", "registered", "named", "many", "many-named", "many-plain", "many-traced", "waiting"),
        sizes=(4, THOUSAND),
        only={"registered": (THOUSAND,), "waiting": (4,)} | dict.fromkeys(report.MANY, (THOUSAND,)),
    ),
}
# Not tensors of some size but whole steps: measured by a program of its own.
TRAINING = "training"
# Not ranks alone but a cluster that starts them: the same.
SPARK = "spark"
# Not ranks at all but rows on their way: programs, called with OUT FOLDER REPETITIONS and a number, which is less with
# --quick.
DATA = "data"
DATA_PROGRAMS = {"data.py": (1_000_000, 50_000), "maps.py": (20_000_000, 400_000), "prepare.py": (1115, 20)}
DEFAULT_CASES = ["host2", "host4", "net", "net4", "gbit", "engine", TRAINING, SPARK, DATA]


@dataclass(frozen=True)
class Programs:
    """What is started, and the folder it may write to."""

    worker: Path
    openmpi: Path | None
    folder: Path


@dataclass(frozen=True)
class Block:
    """All calls of one type and size in one repetition."""

    kind: str
    size: int
    calls: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.size}:{self.calls}:{max(2, self.calls // 10)}"


def blocks(who: str, sizes: list[int], kinds: list[str], quick: bool) -> list[Block]:
    """One contestant's plan of one repetition: many calls where they are short."""
    most, volume = (200, 1 << 24) if quick else (1000, 1 << 27)
    if who == "gloo":
        # Its shortest call takes hundreds of microseconds.
        most //= 10
    if who == "waiting":
        # Each call is half a second of waiting.
        most = 4
    return [Block(kind, size, max(4, min(most, volume // size))) for kind in kinds for size in sizes]


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def shared_memory(size: int) -> Iterator[int]:
    """Memory that the ranks of the bare loop inherit."""
    descriptor = os.memfd_create("deuteron-bench", 0)
    try:
        os.ftruncate(descriptor, size)
        yield descriptor
    finally:
        os.close(descriptor)


def rank_commands(name: str, case: Case, programs: Programs, meeting: str, plan: list[str]) -> list[list[str]]:
    """One command line a rank."""
    out = str(programs.folder / "times")
    secure = ["--tls", str(programs.folder)]
    start = {
        "gloo": [sys.executable, str(HERE / "peers" / "gloo.py")],
        "registered": [str(programs.worker), "registered"],
        "plain": [str(programs.worker), "plain"],
        "flat": [str(programs.worker), "plain", "--flat"],
        **{who: [str(programs.worker), who] for who in ("named", "waiting", *report.MANY)},
        "tcp": [str(programs.worker), "plain"],
        "tls": [str(programs.worker), "plain", *secure],
        "loop": [str(programs.worker), "loop"],
        "raw-tcp": [str(programs.worker), "raw"],
        "raw-tls": [str(programs.worker), "raw", *secure],
    }[name]
    return [[*start, out, str(rank), str(case.ranks), meeting, *plan] for rank in range(case.ranks)]


def mpirun(case: Case, programs: Programs, two: Hosts | None, plan: list[str]) -> list[str]:
    """The one command that starts all ranks of Open MPI."""
    program = [str(programs.openmpi), str(programs.folder / "times"), *plan]
    argv = ["mpirun", "--allow-run-as-root", "-np", str(case.ranks)]
    if two is None:
        # Ranks that share a core yield to each other only if mpirun may know that they do.
        crowded = case.ranks > len(os.sched_getaffinity(0))
        return [*argv, *(["--oversubscribe"] if crowded else []), *program]
    network = ADDRESSES[0].rpartition(".")[0] + ".0/24"
    # Each host would bind its first rank to the same first core of the machine, and not know that ranks share cores.
    slots = case.ranks // case.hosts
    argv += ["-H", ",".join(f"{address}:{slots}" for address in ADDRESSES), "--bind-to", "none"]
    argv += ["--mca", "btl", "tcp,self" if slots == 1 else "vader,tcp,self"]
    if case.ranks > len(os.sched_getaffinity(0)):
        argv += ["--mca", "mpi_yield_when_idle", "1"]
    for layer in ("btl", "oob"):
        argv += ["--mca", f"{layer}_tcp_if_include", network]
    return two.inside(0, [*argv, "--mca", "plm_rsh_agent", str(two.agent), *program])


def start(
    name: str, case: Case, programs: Programs, two: Hosts | None, plan: list[Block], options: argparse.Namespace
) -> None:
    """Runs one contestant through the plan."""
    limit, words = options.limit, [str(block) for block in plan]
    environment = {"OMP_NUM_THREADS": "1", "TMPDIR": str(programs.folder)}
    if name == "openmpi":
        hosts.run_together([Command(mpirun(case, programs, two, words), environment)], limit)
    elif name == "loop":
        # As `bare_loop.rs` lays it out: a header and one buffer a rank, each a multiple of 2 MiB.
        stride = -(-max(block.size for block in plan) // (2 * MIB)) * 2 * MIB
        with shared_memory(2 * MIB + case.ranks * stride) as memory:
            ranks = rank_commands(name, case, programs, str(memory), words)
            hosts.run_together([Command(argv, environment, (memory,)) for argv in ranks], limit)
    elif two is None:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        ranks = rank_commands(name, case, programs, f"127.0.0.1:{free_port()}", words)
        hosts.run_together([Command(argv, environment) for argv in ranks], limit)
    else:
        environment["GLOO_SOCKET_IFNAME"] = hosts.DEVICE
        ranks = rank_commands(name, case, programs, f"{ADDRESSES[0]}:29500", words)
        placed = [two.inside(case.host(rank), argv) for rank, argv in enumerate(ranks)]
        hosts.run_together([Command(argv, environment) for argv in placed], limit)


def read_times(case: Case, folder: Path, plan: list[Block]) -> Iterator[tuple[Block, float]]:
    """Each block's time in nanoseconds: the slowest rank of each call, then the median call."""
    files = [folder / f"times.{rank}" for rank in range(case.ranks)]
    lines = [file.read_text().splitlines() for file in files]
    for block, *ranks in zip(plan, *lines, strict=True):
        times = []
        for line in ranks:
            kind, size, *calls = line.split()
            if (kind, int(size), len(calls)) != (block.kind, block.size, block.calls):
                raise Failed(f"{block} was not measured: {line[:60]}")
            times.append([int(call) for call in calls])
        yield block, median(max(call) for call in zip(*times, strict=True))
    for file in files:
        file.unlink()


def measure(name: str, case: Case, programs: Programs, options: argparse.Namespace) -> list[report.Figure]:
    """All repetitions of all contestants of one case."""
    sizes = [size for size in options.sizes if not case.sizes] or list(case.sizes)
    contestants = [who for who in case.contestants if who in options.only]
    medians: dict[tuple[str, str, int], list[float]] = {}
    with contextlib.ExitStack() as stack:
        two = stack.enter_context(hosts.two_hosts(programs.folder, case.rate)) if case.hosts == 2 else None
        for repetition in range(options.repetitions):
            # Back and forth, so that nobody always runs after the same neighbour.
            for who in contestants if repetition % 2 == 0 else reversed(contestants):
                began = time.monotonic()
                own = [size for size in sizes if size in case.only.get(who, sizes)]
                plan = blocks(who, own, options.types, options.quick)
                try:
                    start(who, case, programs, two, plan, options)
                except Failed as failure:
                    raise Failed(f"{report.LABELS[who]} in case {name}: {failure}") from failure
                for block, time_ns in read_times(case, programs.folder, plan):
                    medians.setdefault((who, block.kind, block.size), []).append(time_ns)
                took = time.monotonic() - began
                print(f"{name}: {repetition + 1}/{options.repetitions} {who} {took:.1f} s", file=sys.stderr, flush=True)
    return [report.Figure(name, who, kind, size, times) for (who, kind, size), times in medians.items()]


def train(programs: Programs, options: argparse.Namespace) -> list[report.Figure]:
    """All repetitions of PyTorch's steps, with us and with its own way."""
    values: dict[tuple[str, str, int], list[float]] = {}
    out = programs.folder / "training"
    # What was freed stays mapped: else the base pays for 40 MB of new pages in some processes and not in others.
    keeping = {"MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
    # Every tensor is a mapping of its own, so that what was freed does not count.
    careful = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    plans: list[tuple[int, list[str], dict[str, str]]] = [
        (2, ["times", "1" if options.quick else "5"], keeping),
        *((ranks, ["memory", who], careful) for who, ranks in (("single", 1), ("ours", 2), ("ddp", 2))),
    ]
    for repetition in range(options.repetitions):
        for ranks, (what, last), more in plans:
            began = time.monotonic()
            argv = [sys.executable, str(HERE / "training.py"), what, str(out), f"127.0.0.1:{free_port()}", last]
            if ranks > 1:
                argv = [sys.executable, "-m", "deuteron", "run", "-n", str(ranks), "--", *argv]
            environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(programs.folder), **more}
            hosts.run_together([Command(argv, environment)], options.limit)
            files = [Path(f"{out}.{rank}") for rank in range(ranks)]
            for lines in zip(*(file.read_text().splitlines() for file in files), strict=True):
                told = [json.loads(line) for line in lines]
                # The slowest rank of each step, then the median step.
                slowest = [max(each) for each in zip(*(times for *_, times in told), strict=True)]
                values.setdefault(tuple(told[0][:3]), []).append(median(slowest))
            for file in files:
                file.unlink()
            took = time.monotonic() - began
            done = f"{TRAINING}: {repetition + 1}/{options.repetitions} {what} {last} {took:.1f} s"
            print(done, file=sys.stderr, flush=True)
    return [report.Figure(TRAINING, who, what, size, found) for (what, who, size), found in values.items()]


def start_on_spark(programs: Programs, options: argparse.Namespace) -> list[report.Figure]:
    """Gangs in a session of Spark's: all repetitions are in one, which is warm."""
    began = time.monotonic()
    out, folder = programs.folder / "spark.times", programs.folder / "spark"
    rows = 100_000 if options.quick else 1_800_000
    argv = [sys.executable, str(HERE / "spark.py"), str(out), str(folder), str(options.repetitions), str(rows)]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(programs.folder)}
    hosts.run_together([Command(argv, environment)], 5 * options.limit)
    told = [json.loads(line) for line in out.read_text().splitlines()]
    print(f"{SPARK}: {options.repetitions} repetitions {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return [report.Figure(SPARK, who, what, size, times) for what, who, size, times in told]


def move_rows(programs: Programs, options: argparse.Namespace) -> list[report.Figure]:
    """All repetitions of every program that measures how rows move."""
    figures = []
    for program, (many, few) in DATA_PROGRAMS.items():
        began = time.monotonic()
        out, folder = programs.folder / f"{program}.times", programs.folder / f"{program}.files"
        words = [str(options.repetitions), str(few if options.quick else many)]
        argv = [sys.executable, str(HERE / program), str(out), str(folder), *words]
        hosts.run_together([Command(argv, {"TMPDIR": str(programs.folder)})], 5 * options.limit)
        told = [json.loads(line) for line in out.read_text().splitlines()]
        figures += [report.Figure(DATA, who, what, size, times) for what, who, size, times in told]
        done = f"{DATA}: {program} {options.repetitions} repetitions {time.monotonic() - began:.1f} s"
        print(done, file=sys.stderr, flush=True)
    return figures


def version(command: list[str]) -> str:
    """The first number in what a program says about itself."""
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "not installed"
    found = re.search(r"\d+\.\d+[\w.]*", said)
    return found[0] if found else "unknown"


def machine_facts(options: argparse.Namespace) -> dict[str, str]:
    """What the figures depend on; nothing that names the machine."""
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    facts = {
        "processor": cpu[1] if cpu else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int(memory[1]) / MIB:.0f} GiB" if memory else "unknown",
        "kernel": f"Linux {platform.release()}",
    }
    if "gloo" in options.only:
        facts["torch (Gloo)"] = importlib.metadata.version("torch")
    if "openmpi" in options.only:
        facts["Open MPI"] = version(["mpirun", "--version"])
    if SPARK in options.cases:
        facts["Spark"] = importlib.metadata.version("pyspark")
    if DATA in options.cases:
        facts["pyarrow"] = importlib.metadata.version("pyarrow")
    if not options.worker:
        facts["rustc"] = version(["rustc", "--version"])
    if any(is_on_two_hosts(name) for name in options.cases):
        facts["two hosts"] = f"network namespaces and a veth pair, {hosts.CONGESTION}"
    facts["repetitions"] = str(options.repetitions)
    return facts


def is_on_two_hosts(name: str) -> bool:
    """Whether a case needs network namespaces."""
    return name in CASES and CASES[name].hosts == 2


def can_have_hosts() -> bool:
    """Whether this user may make network namespaces."""
    name = f"{hosts.PREFIX}{os.getpid()}-probe"
    if not shutil.which("ip") or subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


def leave_out_what_is_missing(options: argparse.Namespace) -> None:
    """Drops what cannot run here and says so; in CI that is a failure."""
    missing = []
    if "gloo" in options.only and not importlib.util.find_spec("torch"):
        missing.append("torch, for Gloo")
        options.only.remove("gloo")
    if "openmpi" in options.only and not (shutil.which("mpicc") and shutil.which("mpirun")):
        missing.append("mpicc and mpirun, for Open MPI")
        options.only.remove("openmpi")
    if any(is_on_two_hosts(name) for name in options.cases) and not can_have_hosts():
        missing.append("network namespaces, for two hosts")
        options.cases = [name for name in options.cases if not is_on_two_hosts(name)]
    if TRAINING in options.cases and not (importlib.util.find_spec("torch") and importlib.util.find_spec("deuteron")):
        missing.append("torch and the deuteron package, for training")
        options.cases.remove(TRAINING)
    needed = [name for name in ("pyspark", "pyarrow", "torch", "deuteron") if not importlib.util.find_spec(name)]
    has_java = bool(shutil.which("java") or os.environ.get("JAVA_HOME"))
    if SPARK in options.cases and (needed or not has_java):
        missing.append(f"{', '.join(needed) or 'java'}, for Spark")
        options.cases.remove(SPARK)
    if DATA in options.cases and (needed := [name for name in needed if name != "pyspark"]):
        missing.append(f"{', '.join(needed)}, for data")
        options.cases.remove(DATA)
    for thing in missing:
        if os.environ.get("CI") == "true":
            raise Failed(f"missing: {thing} (with CI=true that is a failure)")
        print(f"left out: {thing}", file=sys.stderr)


def build(options: argparse.Namespace, folder: Path) -> Programs:
    """Compiles our worker and Open MPI's, and makes the run's certificates."""
    worker, openmpi = options.worker, None
    if not worker:
        subprocess.run(["cargo", "build", "--release", "--locked", "-p", "deuteron-bench"], cwd=HERE, check=True)
        metadata = ["cargo", "metadata", "--format-version", "1", "--no-deps"]
        said = subprocess.run(metadata, cwd=HERE, check=True, capture_output=True, text=True).stdout
        found = re.search(r'"target_directory":"([^"]*)"', said)
        worker = Path(found[1] if found else "target", "release", "deuteron-bench")
    if "openmpi" in options.only:
        openmpi = folder / "openmpi"
        compiler = ["mpicc", "-O3", "-march=native", "-o", str(openmpi)]
        subprocess.run([*compiler, str(HERE / "peers" / "openmpi.c")], check=True)
    subprocess.run([worker, "identity", folder], check=True)
    return Programs(worker, openmpi, folder)


def size_of(text: str) -> int:
    """`4`, `64K` or `16M` in bytes."""
    number, unit = re.fullmatch(r"(\d+)([KM]?)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"": 1, "K": 1 << 10, "M": MIB}[unit]


def parse() -> argparse.Namespace:
    """The options, with those that depend on others filled in."""
    everyone = sorted({who for case in CASES.values() for who in case.contestants})

    def listed(choices: list[str]) -> dict[str, object]:
        return {"nargs": "+", "choices": choices, "metavar": "NAME", "help": "of " + ", ".join(choices)}

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute; writes nothing unless --out is given")
    parser.add_argument("--cases", default=DEFAULT_CASES, **listed([*CASES, TRAINING, SPARK, DATA]))  # type: ignore[arg-type]
    parser.add_argument("--only", default=everyone, **listed([*everyone, "ours"]))  # type: ignore[arg-type]
    parser.add_argument("--types", default=["f32", "bf16"], **listed(["f32", "bf16"]))  # type: ignore[arg-type]
    parser.add_argument("--sizes", nargs="+", type=size_of, metavar="BYTES", help="such as 4 64K 16M")
    parser.add_argument("--repetitions", type=int, help="5, or 1 with --quick")
    parser.add_argument("--limit", type=float, help="seconds one contestant may take for one repetition")
    parser.add_argument("--worker", type=Path, help="a worker that is built already, for a machine without cargo")
    parser.add_argument("--out", type=Path, help="folder for the page, its JSON and its plot")
    parser.add_argument("--name", default="benchmarks", help="name of the JSON and the plot")
    options = parser.parse_args()
    options.only = [*options.only, *(report.OURS if "ours" in options.only else ())]
    options.cases = list(options.cases)
    options.sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    options.repetitions = options.repetitions or (1 if options.quick else 5)
    options.limit = options.limit or (60 if options.quick else 600)
    options.out = options.out or (None if options.quick else HERE.parent / "docs")
    return options


def main() -> None:
    """Builds, measures and reports."""
    options = parse()
    hosts.adopt_orphans()
    hosts.remove_leftovers()
    hosts.on_signals(lambda number, _: sys.exit(128 + number))
    atexit.register(hosts.kill_children)
    try:
        leave_out_what_is_missing(options)
        with hosts.own_folder() as folder:
            programs = build(options, folder)
            figures = []
            for name in options.cases:
                if name == TRAINING:
                    figures += train(programs, options)
                elif name == SPARK:
                    figures += start_on_spark(programs, options)
                elif name == DATA:
                    figures += move_rows(programs, options)
                else:
                    figures += measure(name, CASES[name], programs, options)
        run = report.Run(machine_facts(options), figures)
    except Failed as failure:
        sys.exit(f"benchmark failed: {failure}")
    print(report.text(run))
    if options.out:
        report.save(run, options.out, options.name)


if __name__ == "__main__":
    main()
