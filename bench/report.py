"""Turns figures into ratios, tables, a plot and the page of the docs.

bench/report.py FOLDER      makes the page again from every benchmarks*.json in the folder
"""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

LABELS = {
    "registered": "Deuteron, registered",
    "plain": "Deuteron, plain slice",
    "flat": "Deuteron, flat",
    "named": "Deuteron, named",
    "many": "Deuteron, 1,000 names, prepared",
    "many-named": "Deuteron, 1,000 names, looked up",
    "many-plain": "Deuteron, 1,000 names, plain",
    "many-traced": "Deuteron, 1,000 names, registered, timeline on",
    "waiting": "Deuteron, processor time of 0.5 s of waiting",
    "tcp": "Deuteron, TCP",
    "tls": "Deuteron, TLS",
    "gloo": "Gloo",
    "openmpi": "Open MPI",
    "loop": "bare loop",
    "raw-tcp": "raw TCP",
    "raw-tls": "bare rustls",
}
TITLES = {
    "host2": "one host, 2 ranks",
    "host4": "one host, 4 ranks",
    "host8": "one host, 8 ranks",
    "host16": "one host, 16 ranks",
    "net": "two hosts, one rank each",
    "net4": "two hosts, two ranks each",
    "gbit": "two hosts, 1 Gbit/s",
    "engine": "the engine, one host, 2 ranks",
}
MANY = ("many", "many-named", "many-plain", "many-traced")
OURS = ("registered", "plain", "tcp", "tls", "named", *MANY, "waiting")
PEERS = ("gloo", "openmpi")
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Figure:
    """One contestant's time for one type and size, in nanoseconds, by repetition."""

    case: str
    contestant: str
    type: str
    bytes: int
    repetitions: list[float]

    @property
    def time(self) -> float:
        """The median repetition."""
        return median(self.repetitions)


@dataclass(frozen=True)
class Run:
    """All figures of one run on one machine."""

    facts: dict[str, str]
    figures: list[Figure]


@dataclass(frozen=True)
class Row:
    """One of our figures beside the peers' and the limit's, from the same run."""

    ours: Figure
    peers: dict[str, Figure]
    limit: Figure | None

    def faster_than(self, *others: Figure | None) -> float | None:
        """How many times faster than the best of the others: in each repetition, then the median.

        What changes the machine from one repetition to the next is then the same on both sides.
        """
        best = [min(times) for times in zip(*(other.repetitions for other in others if other), strict=True)]
        ratios = [other / own for other, own in zip(best, self.ours.repetitions, strict=False)]
        return median(ratios) if ratios else None

    def later_than(self, other: Figure) -> float:
        """By how many nanoseconds: in each repetition, then the median."""
        return median(own - its for own, its in zip(self.ours.repetitions, other.repetitions, strict=False))

    @property
    def to_peer(self) -> float | None:
        """How many times faster than the better peer."""
        return self.faster_than(*self.peers.values())

    @property
    def to_limit(self) -> float | None:
        """Which part of the limit's speed."""
        return self.faster_than(self.limit)


@dataclass(frozen=True)
class Target:
    """What is to be reached, where, and whether a row does."""

    what: str
    to_reach: str
    applies: Callable[[Row], bool]
    reached: Callable[[Row], bool]


def _at_least(value: float | None, bound: float) -> bool:
    """A ratio as printed, with two digits, against its bound."""
    return value is not None and value >= bound


def _one_host(row: Row) -> bool:
    return row.ours.case.startswith("host")


def _no_slower(row: Row) -> bool:
    """Among two ranks Open MPI is the one to match, else the better peer."""
    if row.ours.case == "host2" and "openmpi" in row.peers:
        return _at_least(row.faster_than(row.peers["openmpi"]), 1)
    return _at_least(row.to_peer, 1)


TARGETS = (
    Target(
        "one host, registered, 64 KiB and more",
        "5 x the better peer, or 0.85 of the bare loop",
        lambda row: _one_host(row) and row.ours.contestant == "registered" and row.ours.bytes >= 64 * KIB,
        lambda row: _at_least(row.to_peer, 5) or _at_least(row.to_limit, 0.85),
    ),
    Target(
        "one host, plain slices, 1 MiB and more",
        "2 x the better peer",
        lambda row: _one_host(row) and row.ours.contestant == "plain" and bool(row.peers) and row.ours.bytes >= MIB,
        lambda row: _at_least(row.to_peer, 2),
    ),
    Target(
        "one host, 4 B to 4 KiB",
        "2 ranks: no slower than Open MPI; more: than the better peer",
        lambda row: _one_host(row) and row.ours.contestant == "plain" and bool(row.peers) and row.ours.bytes <= 4 * KIB,
        _no_slower,
    ),
    Target(
        "two hosts, plain TCP, 1 MiB and more",
        "the better peer, and 0.8 of raw TCP",
        lambda row: row.ours.case == "net" and row.ours.contestant == "tcp" and row.ours.bytes >= MIB,
        lambda row: _at_least(row.to_peer, 1) and _at_least(row.to_limit, 0.8),
    ),
    *(
        Target(
            f"two hosts with two ranks each, {name}, 1 MiB and more",
            "1.5 x our own flat ring, and 1.5 x the better peer",
            lambda row, who=who: row.ours.case == "net4" and row.ours.contestant == who and row.ours.bytes >= MIB,
            lambda row: _at_least(row.to_peer, 1.5) and _at_least(row.to_limit, 1.5),
        )
        for who, name in (("registered", "registered"), ("plain", "plain slices"))
    ),
    Target(
        "a named call of 4 B, and returning when it is done",
        "within 3 µs of the call without a name",
        lambda row: row.ours.contestant == "named" and row.ours.bytes == 4,
        lambda row: row.limit is not None and row.later_than(row.limit) <= 3000,
    ),
    Target(
        "1,000 named tensors of 1 KiB in a random order on each rank",
        "within 2 x of one all-reduce of the same bytes",
        lambda row: row.ours.contestant == "many",
        lambda row: _at_least(row.to_limit, 0.5),
    ),
    Target(
        "processor time of a rank that waits for a peer",
        "5 % of a core",
        lambda row: row.ours.contestant == "waiting",
        lambda row: row.ours.time <= 0.05 * 0.5e9,
    ),
    Target(
        "two hosts, TLS",
        "0.8 of bare rustls",
        lambda row: row.ours.case == "net" and row.ours.contestant == "tls",
        lambda row: _at_least(row.to_limit, 0.8),
    ),
    Target(
        "two hosts, TLS over 1 Gbit/s",
        "0.95 of plain TCP",
        lambda row: row.ours.case == "gbit" and row.ours.contestant == "tls",
        lambda row: _at_least(row.to_limit, 0.95),
    ),
)


def _limit_of(case: str, contestant: str) -> str:
    """Whose time is the limit of ours."""
    if case == "engine":
        return {"many-traced": "many", "waiting": "none", "plain": "none"}.get(contestant, "plain")
    if case == "net4":
        return "flat"
    if case == "gbit":
        return {"tcp": "raw-tcp", "tls": "tcp"}[contestant]
    return {"registered": "loop", "plain": "loop", "tcp": "raw-tcp", "tls": "raw-tls"}[contestant]


def rows(run: Run) -> list[Row]:
    """Every one of our figures with what it is compared to."""
    known = {(f.case, f.contestant, f.type, f.bytes): f for f in run.figures}

    def beside(ours: Figure, who: str) -> Figure | None:
        return known.get((ours.case, who, ours.type, ours.bytes))

    return [
        Row(
            ours,
            {who: peer for who in PEERS if (peer := beside(ours, who))},
            beside(ours, _limit_of(ours.case, ours.contestant)),
        )
        for ours in run.figures
        if ours.contestant in OURS
    ]


def _verdict(row: Row) -> str:
    verdicts = ["reached" if target.reached(row) else "not reached" for target in TARGETS if target.applies(row)]
    return ", ".join(verdicts)


def size(count: int) -> str:
    """Bytes as people write them."""
    for unit, factor in (("MiB", MIB), ("KiB", KIB)):
        if count >= factor:
            return f"{count // factor} {unit}"
    return f"{count} B"


def duration(nanoseconds: float) -> str:
    """A time with three digits."""
    unit, factor = next((pair for pair in (("s", 1e9), ("ms", 1e6)) if abs(nanoseconds) >= pair[1]), ("µs", 1e3))
    return f"{nanoseconds / factor:.3g} {unit}"


def _range(figure: Figure) -> str:
    """From where to where single repetitions go."""
    return f"{duration(min(figure.repetitions))} to {duration(max(figure.repetitions))}"


HEADINGS = ("size", "time", "lowest to highest", "GB/s", "Gloo", "Open MPI", "x peer", "limit", "of limit", "target")


def _cells(row: Row) -> list[str]:
    def ratio(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    ours = row.ours
    return [
        size(ours.bytes),
        duration(ours.time),
        _range(ours),
        f"{ours.bytes / ours.time:.3g}",
        *(duration(row.peers[who].time) if who in row.peers else "" for who in PEERS),
        ratio(row.to_peer),
        duration(row.limit.time) if row.limit else "",
        ratio(row.to_limit),
        _verdict(row),
    ]


def _groups(made: list[Row]) -> Iterable[tuple[str, list[Row]]]:
    """Rows under a heading, in the order of the cases."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in made:
        groups.setdefault((row.ours.case, row.ours.type, row.ours.contestant), []).append(row)
    order = [*TITLES, "f32", "bf16", *OURS]
    for key in sorted(groups, key=lambda key: [order.index(word) for word in key]):
        case, kind, contestant = key
        limit = next((LABELS[row.limit.contestant] for row in groups[key] if row.limit), "none")
        yield f"{LABELS[contestant]}, {kind}: {TITLES[case]} (limit: {limit})", groups[key]


def _summary(run: Run, made: list[Row]) -> list[list[str]]:
    """How many rows reach each target, by case."""
    lines = []
    for target in TARGETS:
        for case, title in TITLES.items():
            judged = [target.reached(row) for row in made if row.ours.case == case and target.applies(row)]
            if judged:
                verdict = "reached" if all(judged) else "not reached"
                lines.append([target.what, title, target.to_reach, f"{sum(judged)} of {len(judged)}", verdict])
    for title, found in _stories(run):
        for line in found:
            verdict = "reached" if line.reached else "not reached"
            lines.append([line.what, title, line.to_reach, f"{int(line.reached)} of 1", verdict])
    return lines


SUMMARY_HEADINGS = ("to reach in", "case", "target", "sizes and types", "")


@dataclass(frozen=True)
class Comparison:
    """One target that is not about a size: ours, the other's, and how they compare."""

    what: str
    ours: str
    other: str
    compared: str
    to_reach: str
    reached: bool

    def cells(self) -> list[str]:
        """Its line of the table."""
        verdict = "reached" if self.reached else "not reached"
        return [self.what, self.ours, self.other, self.compared, self.to_reach, verdict]


TRAINING_TITLE = "PyTorch, one host, 2 ranks"
SPARK_TITLE = "Spark, 2 ranks in a warm session"
DATA_TITLE = "Data, one process"
STORY_HEADINGS = ("ours", "theirs", "compared", "to reach", "")
STEPS = {
    "step": ("overhead of a step of an MLP with 10 M parameters", 1 / 4),
    "backward": ("overhead of a backward pass with 1,000 tensors of 1 KiB", 1 / 3),
}


def _spread(values: list[float], unit: Callable[[float], str]) -> str:
    """The median, and from where to where single repetitions go."""
    return f"{unit(median(values))} ({unit(min(values))} to {unit(max(values))})"


def _known(run: Run, case: str) -> tuple[dict[str, dict[str, list[float]]], dict[str, int]]:
    """The repetitions of a case by what is measured and by contestant, and the bytes of what is measured."""
    known: dict[str, dict[str, list[float]]] = {}
    sizes = {}
    for figure in run.figures:
        if figure.case == case:
            known.setdefault(figure.type, {})[figure.contestant] = figure.repetitions
            sizes[figure.type] = figure.bytes
    return known, sizes


def training(run: Run) -> list[Comparison]:
    """Every target of training, from this run."""
    known, sizes = _known(run, "training")

    def best(what: str, who: str) -> list[float]:
        """In each repetition the fastest of somebody's variants."""
        found = [times for name, times in known[what].items() if name.startswith(who)]
        return [min(times) for times in zip(*found, strict=True)]

    lines = []
    for call in ("hvd.allreduce", "hvd.allreduce_"):
        if call in known.get("allreduce", {}):
            ours, gloo = known["allreduce"][call], known["allreduce"]["torch.distributed"]
            ratio = median(its / own for own, its in zip(ours, gloo, strict=True))
            names = f"{call} of 4 B", _spread(ours, duration), f"torch.distributed: {_spread(gloo, duration)}"
            lines.append(Comparison(*names, f"{ratio:.1f} x faster", "20 x faster", ratio >= 20))
    for what, (title, bound) in STEPS.items():
        if what in known:
            base = best(what, "base")
            own, ddp = (
                [time - alone for time, alone in zip(best(what, who), base, strict=True)] for who in ("ours", "DDP")
            )
            # Somebody who is no slower than the base, by chance, has no overhead.
            part = median(max(mine, 0) / max(its, 1) for mine, its in zip(own, ddp, strict=True))
            beside = f"DDP: {_spread(ddp, duration)}, base {duration(median(base))}"
            row = title, _spread(own, duration), beside, f"{part:.3f} of theirs", f"at most {bound:.3f}"
            lines.append(Comparison(*row, part <= bound))
    if "memory" in known:
        single = known["memory"]["single"]
        own, ddp = (
            [(has - alone) / sizes["memory"] for has, alone in zip(known["memory"][who], single, strict=True)]
            for who in ("ours", "ddp")
        )

        def copies(value: float) -> str:
            return f"{value:.2f}"

        names = "memory beyond that of a single process, in copies of the gradients", _spread(own, copies)
        compared = f"{size(sizes['memory'])} each"
        row = *names, f"DDP: {_spread(ddp, copies)}", compared, "at most 1"
        lines.append(Comparison(*row, median(own) <= 1))
    return lines


def spark(run: Run) -> list[Comparison]:
    """Every target of gangs on Spark, from this run."""
    known, sizes = _known(run, "spark")
    lines = []
    if "gang" in known:
        gang = known["gang"]
        ours, theirs = gang["ours"], gang["TorchDistributor"]
        ratio = median(its / own for own, its in zip(ours, theirs, strict=True))
        names = "two ranks: init, one all-reduce, return", _spread(ours, duration)
        row = *names, f"TorchDistributor: {_spread(theirs, duration)}", f"{ratio:.1f} x faster", "3 x faster"
        lines.append(Comparison(*row, ratio >= 3))
        others = gang["bare stage"], gang["imports"]
        own = [took - stage - imports for took, stage, imports in zip(ours, *others, strict=True)]
        beside = (
            f"bare barrier stage: {duration(median(others[0]))}, two imports of torch: {duration(median(others[1]))}"
        )
        row = "our own part of it", _spread(own, duration), beside, "what we take beyond both", "under 0.5 s"
        lines.append(Comparison(*row, median(own) < 0.5e9))
    if "kill" in known:
        ours = known["kill"]["ours"]
        row = "from the kill of a rank to the driver's exception", _spread(ours, duration), "", "", "under 3 s"
        lines.append(Comparison(*row, median(ours) < 3e9))
    if "rows" in known:
        rows = known["rows"]
        ours, theirs = rows["ours"], rows["mapInArrow"]
        ratio = median(its / own for own, its in zip(ours, theirs, strict=True))
        names = f"{size(sizes['rows'])} of rows into ranks", _spread(ours, duration)
        row = *names, f"mapInArrow: {_spread(theirs, duration)}", f"{ratio:.2f} x faster", "no slower"
        lines.append(Comparison(*row, ratio >= 1))
        first, second = rows["first epoch"], rows["second epoch"]
        ratio = median(one / other for one, other in zip(first, second, strict=True))
        names = "second epoch over them", _spread(second, duration), f"first epoch: {_spread(first, duration)}"
        lines.append(Comparison(*names, f"{ratio:.1f} x faster", "20 x faster", ratio >= 20))
    return lines


# The peers whose rows are mixed as ours are.
MIXED_LIKE = {"full": "take by permutation", "buffer": "iter_batches"}
# What the threads of a loader hold beyond what it may keep, and the C library with them.
BESIDE = 64 * MIB
# What the C library keeps from one epoch to the next, or not, as chance will have it.
FLAT = 8 * MIB


def data(run: Run) -> list[Comparison]:
    """Every target of rows on their way, from this run."""
    known, sizes = _known(run, "data")
    lines = []
    for form in ("columns", "matrices"):
        if form not in known:
            continue
        epochs = known[form]
        for shuffle, like in MIXED_LIKE.items():
            ours = epochs[f"deuteron, {shuffle}"]
            what = f"an epoch of {sizes[form]:,} rows, from Parquet to {form}, shuffle {shuffle}"
            peers = {who: times for who, times in epochs.items() if who.startswith(like)}
            best = min(peers, key=lambda who: median(peers[who]))
            # In each repetition the fastest of theirs.
            fastest = [min(times) for times in zip(*peers.values(), strict=True)]
            for who, theirs, bound in (
                (best, fastest, 1.5),
                ("row-indexed Dataset", epochs["row-indexed Dataset"], 20),
            ):
                ratio = median(its / own for own, its in zip(ours, theirs, strict=True))
                row = what, _spread(ours, duration), f"{who}: {_spread(theirs, duration)}", f"{ratio:.2f} x faster"
                lines.append(Comparison(*row, f"{bound:g} x faster", ratio >= bound))
    if "map" in known:
        ours, theirs = known["map"]["ours"], known["map"]["row at a time"]
        what = f"x + 1 over {sizes['map'] // 8:,} longs in other processes"
        ratio = median(its / own for own, its in zip(ours, theirs, strict=True))
        beside = f"row at a time: {_spread(theirs, duration)}"
        row = what, _spread(ours, duration), beside, f"{ratio:.1f} x faster", "20 x faster"
        lines.append(Comparison(*row, ratio >= 20))
        rate = median(sizes["map"] / took for took in ours)
        lines.append(Comparison(what, _spread(ours, duration), "", f"{rate:.2f} GB/s", "1 GB/s", rate >= 1))
    if "prepare" in known:
        ours, pandas = known["prepare"]["ours"], known["prepare"]["pandas"]
        ratio = median(its / own for own, its in zip(ours, pandas, strict=True))
        beside = f"pandas: {_spread(pandas, duration)}; Polars: {_spread(known['prepare']['Polars'], duration)}"
        row = f"preparation of {sizes['prepare']:,} rows, Rossmann", _spread(ours, duration), beside
        lines.append(Comparison(*row, f"{ratio:.2f} x faster than pandas", "no slower", ratio >= 1))
    if "memory" in known:
        of_all = sizes["memory"]
        for shuffle in MIXED_LIKE:
            epochs = {who: needs for who, needs in known["memory"].items() if who.startswith(shuffle)}
            most = [max(needs) for needs in zip(*epochs.values(), strict=True)]
            first, *_, last = epochs.values()
            grown = median(end - start for start, end in zip(first, last, strict=True))
            what = f"memory of a loader over {len(epochs)} epochs, shuffle {shuffle}"
            beside = f"rows: {size(of_all)}, of which a tenth may be kept"
            compared = f"from the first to the last epoch {'+' if grown >= 0 else '-'}{size(int(abs(grown)))}"
            bound = of_all // 10 + BESIDE
            to_reach = f"{size(bound)}, and no more than {size(FLAT)} or 5 % growth"
            flat = grown <= max(FLAT, 0.05 * median(first))
            row = what, _spread(most, lambda needs: size(int(needs))), beside, compared, to_reach
            lines.append(Comparison(*row, median(most) <= bound and flat))
    return lines


def _stories(run: Run) -> list[tuple[str, list[Comparison]]]:
    """Comparisons that are there, with their titles."""
    stories = ((TRAINING_TITLE, training(run)), (SPARK_TITLE, spark(run)), (DATA_TITLE, data(run)))
    return [(title, found) for title, found in stories if found]


CONTESTANT_HEADINGS = ("what", "who", "time", "lowest to highest")


def _contestants(run: Run, title: str) -> list[list[str]]:
    """The times behind comparisons."""
    case = {TRAINING_TITLE: "training", SPARK_TITLE: "spark", DATA_TITLE: "data"}[title]
    return [
        [figure.type, figure.contestant, duration(figure.time), _range(figure)]
        for figure in run.figures
        if figure.case == case and figure.type != "memory"
    ]


def _text_table(headings: Iterable[str], lines: list[list[str]]) -> str:
    table = [list(headings), *lines]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table)


def _markdown_table(headings: Iterable[str], lines: list[list[str]]) -> str:
    table = [list(headings), ["---:"] * len(list(headings)), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in table)


def text(run: Run) -> str:
    """The report for a terminal."""
    made = rows(run)
    parts = [f"{heading}\n{_text_table(HEADINGS, [_cells(row) for row in found])}" for heading, found in _groups(made)]
    for title, lines in _stories(run):
        parts.append(_text_table(CONTESTANT_HEADINGS, _contestants(run, title)))
        parts.append(_text_table((title, *STORY_HEADINGS), [line.cells() for line in lines]))
    parts.append(_text_table(SUMMARY_HEADINGS, _summary(run, made)))
    return "\n\n".join(parts)


HOW = """\
# Benchmarks

Made by `make bench`. Us, Gloo (`torch.distributed`) and Open MPI (C, `mpicc -O3 -march=native`) run in turn in the
same run, and beside them the limit.

How it is measured:

- One process per rank. Every rank rewrites its whole buffer, waits at a barrier, makes the timed call (an all-reduce,
  sum, in place) and waits again: otherwise a rank that shares a core with one that rewrites its buffer already
  would see the end of the call late. The slowest rank's time counts. A time is the median over the calls of a
  repetition, then over repetitions; "lowest to highest" are single repetitions. A ratio is taken in each
  repetition, then the median: a machine whose cores move closer or further apart from one minute to the next does
  so for both sides.
- First and last results of every size are checked on every rank, all elements.
- GB/s is the size of one rank's buffer over the time.
- MPI has no bf16: Open MPI sums it by a user-defined operation on 16-bit integers, whose loop is vectorised. It yields
  when ranks share a core (`--oversubscribe`, or `mpi_yield_when_idle` where hosts are simulated), and binds ranks to
  cores as it does by default when they do not.
- Two hosts are two network namespaces with a virtual cable, so both share the machine's cores. All use
  the same congestion control, reno: with BBR, the default of some machines, which paces by round trips that a virtual
  cable does not have, all are half as fast. 1 Gbit/s is `tc tbf` on both ends. With two ranks on each host everybody
  uses plain TCP between hosts, and Open MPI may use shared memory inside them.
- The engine's "limit" is one all-reduce of the same bytes by a call without a name, on plain slices. Its 1,000 tensors
  of 1 KiB are submitted in an order that each rank draws anew, and then waited for one by one; in registered memory
  they lie side by side in one bucket and are prepared once, as gradients are; "looked up" finds each by its name again
  every time. With the timeline on, the "limit" is the same without it. Of
  waiting, the time is what the rank's process computes, on all threads, while the other is half a second late.
- PyTorch: us and `DistributedDataParallel` over Gloo in the same two processes, one thread each, in turns of three
  steps; each step starts together and the slowest rank's time counts. A step is zero_grad, forward, backward and step
  of SGD on 32 rows; of the 1,000 tensors it is zero_grad, forward and backward, until gradients are those of all ranks.
  The base is the same without communication, on both ranks at once. Overhead is what somebody takes beyond the base;
  everybody counts with the fastest of their ways: gradients dropped ("none") or zeroed, DDP with and without
  `gradient_as_bucket_view` ("view") and `static_graph` ("static"). Models and gradients are compared at the end.
  The C library keeps what is freed (`MALLOC_TRIM_THRESHOLD_`): otherwise a process gives 40 MB of gradients back to the
  system and takes them again in every step, or does not, as chance will have it, and the base varies by a third.
  Memory is what a rank has of its own and its share of what it has together with others (`Pss_Anon` and `Pss_Shmem`),
  after backward, beyond that of a process that trains alone.
- Spark: a standalone cluster on this machine, a master and two workers with one core each, and one session that is
  warm. Both gangs are two ranks in two executors that start, sum one number and return: ours, and Spark's own
  `TorchDistributor`, over Gloo. Our own part is what remains of our time after a barrier stage of two tasks that do
  nothing, and two processes at once that import torch, do nothing else and leave without Python's exit; chance can
  make it negative. The rows are numbers, texts and binary tensors in the executors' memory, dealt out to two tasks
  (`repartition(2)` for Spark); each byte is looked at, by us in the ranks and by Spark's `mapInArrow` in its own
  workers, in the same words: NumPy over DLPack, since Arrow's own `to_numpy` imports pandas, which Spark's workers have
  done already. The first epoch is from the call in the driver to a rank's last row, the second reads the same rows in
  the same rank again; its time is not part of ours.
- Data: one Parquet file with the 37 columns of Rossmann, prepared, and as many different values in each; eight row
  groups to a million rows, because workers of `DataLoader` share groups. An epoch is everything from opening the file
  to the last of its mini-batches of 1,024 rows, each of which is either one tensor for each column or two matrices
  and the sales. Where we mix all rows, the peers are those who do (`take` by permutation: by PyTorch 65,536 rows at a
  time, in this process or in two workers, or all rows at once, and by pyarrow a mini-batch at a time); where we mix
  the rows of a buffer of 65,536, it is `iter_batches` with the same buffer, here or in two workers. In each
  repetition we are compared with the fastest of them. A row-indexed `Dataset` is opened, and the time of 20,000 rows
  is taken for that of as many as there are. Memory is what no file backs (`RssAnon` and `RssShmem`) beyond what there
  was before the loader was made, at most, by epoch, of a process that loads ten times more than it may keep, three
  times. x + 1 over longs goes through a function on batches in two other processes (`deuteron.map_batches`), and row
  at a time through one on rows in another: pickled lists of 100 rows through a pipe, of a twentieth of the rows. The
  preparation is that of examples/rossmann, from CSV files to Parquet, by DataFusion, and the same steps by pandas and
  Polars; all results are compared, value by value.
- Limits: *bare loop* is one pass over the same kind of buffers, each rank summing its slice of all and writing it to
  all, without synchronisation, from the first rank's start to the last one's end. *Raw TCP* and *bare rustls* send the
  bytes of the all-reduce both ways at once over one connection between two processes, without a reduction. Over
  1 Gbit/s the limit of TLS is our plain TCP. Where hosts have two ranks each, "limit" is our own flat ring on plain
  slices, which treats all ranks alike: there it is no limit but what has to be beaten.
"""


def _page(runs: dict[str, Run]) -> str:
    parts = [HOW]
    for name, run in runs.items():
        made = rows(run)
        facts = "\n".join(f"- {fact}: {value}" for fact, value in run.facts.items())
        parts.append(f"## {run.facts['cores']} cores\n\n{facts}\n\n![Bandwidth by size](img/{name}.svg)\n")
        parts.append(_markdown_table(SUMMARY_HEADINGS, _summary(run, made)) + "\n")
        for title, lines in _stories(run):
            parts.append(f"### {title}\n")
            parts.append(_markdown_table((title, *STORY_HEADINGS), [line.cells() for line in lines]) + "\n")
            parts.append(_markdown_table(CONTESTANT_HEADINGS, _contestants(run, title)) + "\n")
        for heading, found in _groups(made):
            parts.append(f"### {heading}\n\n{_markdown_table(HEADINGS, [_cells(row) for row in found])}\n")
    return "\n".join(parts)


COLOURS = {
    "registered": "#0072b2",
    "plain": "#56b4e9",
    "flat": "#cc79a7",
    "tcp": "#0072b2",
    "tls": "#56b4e9",
    "gloo": "#d55e00",
    "openmpi": "#009e73",
    "loop": "#888888",
    "raw-tcp": "#888888",
    "raw-tls": "#bbbbbb",
}


def _plot(run: Run, path: Path) -> None:
    """Bandwidth over size, one small plot for each case and type."""
    import matplotlib

    matplotlib.use("svg")
    # The same figures give the same small file.
    matplotlib.rcParams |= {"svg.hashsalt": "deuteron", "svg.fonttype": "none"}
    from matplotlib import pyplot

    cases = [case for case in TITLES if len({f.bytes for f in run.figures if f.case == case}) > 2]
    kinds = list(dict.fromkeys(figure.type for figure in run.figures if figure.case in cases))
    if not cases:
        return
    size_of_plot = (5.2 * len(kinds), 3.6 * len(cases))
    figure, grid = pyplot.subplots(len(cases), len(kinds), figsize=size_of_plot, squeeze=False, layout="constrained")
    for line, case in zip(grid, cases, strict=True):
        for axes, kind in zip(line, kinds, strict=True):
            for who, label in LABELS.items():
                found = [f for f in run.figures if (f.case, f.contestant, f.type) == (case, who, kind)]
                found.sort(key=lambda f: f.bytes)
                rates = [f.bytes / f.time for f in found]
                style = "-" if who in OURS else "--" if who in PEERS else ":"
                if found:
                    axes.plot([f.bytes for f in found], rates, style, color=COLOURS[who], label=label, marker=".")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(f"{TITLES[case]}, {kind}", fontsize=10)
            ticks = [4, 1 << 10, 64 << 10, MIB, 16 * MIB, 256 * MIB]
            axes.set_xticks(ticks, [size(tick) for tick in ticks], fontsize=7)
            axes.set_ylabel("GB/s", fontsize=8)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def save(run: Run, folder: Path, name: str) -> None:
    """Writes the run's JSON, then the page from all runs in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(asdict(run), indent=1) + "\n")
    make_page(folder)


def make_page(folder: Path) -> None:
    """Writes the page and the plots from every benchmarks*.json in the folder."""
    runs = {}
    for path in sorted(folder.glob("benchmarks*.json"), key=lambda path: path.stem):
        stored = json.loads(path.read_text())
        runs[path.stem] = Run(stored["facts"], [Figure(**figure) for figure in stored["figures"]])
        _plot(runs[path.stem], folder / "img" / f"{path.stem}.svg")
    (folder / "benchmarks.md").write_text(_page(runs))


if __name__ == "__main__":
    make_page(Path(sys.argv[1]))
