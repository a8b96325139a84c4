"""Gloo's side of the benchmark, through torch.distributed: one process per rank.

usage: gloo.py OUT RANK RANKS ADDRESS BLOCK...     BLOCK = type:bytes:calls:warmups, type f32 or bf16

Every rank writes OUT.RANK, one line a block: "type bytes nanoseconds...". A wrong result ends the run.
"""

import sys
from datetime import timedelta
from time import perf_counter_ns

import torch
import torch.distributed as dist

# The input of rank r is in[i] = ((i + shift) % PERIOD + r) % VALUES, and the shift changes from call to call. Sums of
# up to 16 ranks are whole numbers below 256: exact in bf16, whatever the order.
PERIOD, VALUES, SHIFTS = 1021, 13, 8
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def pattern(rank: int) -> torch.Tensor:
    """One period of a rank's input."""
    return (torch.arange(PERIOD) + rank) % VALUES


def repeated(period: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The period repeated to `count` elements."""
    return period.to(dtype).repeat(count // PERIOD + 1)[:count].contiguous()


def measure(block: str, rank: int, ranks: int) -> str:
    """Runs one block and returns its line of the output."""
    name, *numbers = block.split(":")
    size, calls, warmups = map(int, numbers)
    dtype = TYPES[name]
    count = size // dtype.itemsize
    source = repeated(pattern(rank), count + SHIFTS, dtype)
    total = sum((pattern(r) for r in range(1, ranks)), pattern(0))
    buffer = torch.empty(count, dtype=dtype)
    times = []
    for call in range(-warmups, calls):
        shift = (call + warmups) % SHIFTS
        buffer.copy_(source[shift : shift + count])
        dist.barrier()
        start = perf_counter_ns()
        dist.all_reduce(buffer)
        times.append(perf_counter_ns() - start)
        dist.barrier()
        if call in (-warmups, calls - 1) and not torch.equal(buffer, repeated(total.roll(-shift), count, dtype)):
            raise SystemExit(f"gloo: rank {rank}: wrong result in {block}")
    return " ".join([name, str(size), *map(str, times[warmups:])])


def main() -> None:
    """Joins the group and measures every block."""
    out, rank, ranks, address, *blocks = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=int(rank), world_size=int(ranks), timeout=timedelta(minutes=5)
    )
    with open(f"{out}.{rank}", "w", encoding="utf-8") as file:
        for block in blocks:
            file.write(measure(block, int(rank), int(ranks)) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
