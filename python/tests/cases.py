"""Many cases on one start of ranks: each is a test of its own, but processes start once for all of them."""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks

Case = Callable[["Checks"], None]


class Checks:
    """What was not as it should be. Ranks go on all the same: others wait for their part of what follows."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def equal(self, actual: Any, expected: Any, what: object = "") -> None:
        """Same type, shape and elements."""
        import torch

        if isinstance(expected, torch.Tensor):
            if not isinstance(actual, torch.Tensor):
                same = False
            else:
                alike = (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
                same = alike and _bits(actual) == _bits(expected)
        else:
            same = bool(actual == expected)
        self.true(same, f"{what}: {actual} instead of {expected}")

    def close(self, actual: Any, expected: Any, what: object = "") -> None:
        """Same type and shape, and elements up to rounding."""
        import torch

        try:
            torch.testing.assert_close(actual, expected, equal_nan=True)
        except AssertionError as error:
            self.true(False, f"{what}: {error}")

    def true(self, condition: bool, what: object) -> None:
        """A condition."""
        if not condition:
            self.wrong.append(str(what))

    def raises(self, kind: type[BaseException], call: Callable[[], Any], *words: str) -> None:
        """An exception with these words."""
        try:
            result = call()
        except kind as error:
            missing = [word for word in words if word not in str(error)]
            self.true(not missing, f"{missing} not in {kind.__name__}: {error}")
        except Exception as error:
            self.true(False, f"{error!r} instead of {kind.__name__}")
        else:
            self.true(False, f"{result} instead of {kind.__name__}")


def _bits(tensor: Any) -> bytes:
    import torch

    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""


def _run(module: str, names: list[str]) -> dict[str, list[str]]:
    import deuteron.torch as hvd

    hvd.init()
    cases = importlib.import_module(module).CASES
    outcomes = {name: ["not reached"] for name in names}
    for name in names:
        checks = Checks()
        outcomes[name] = checks.wrong
        try:
            cases[name](checks)
        except Exception:
            # Ranks may have parted: whoever still waits for this one is told that it is gone.
            checks.wrong.append(traceback.format_exc())
            break
    hvd.shutdown()
    return outcomes


@functools.cache
def outcomes(module: str, ranks: int) -> list[dict[str, list[str]]]:
    """What was wrong in each case, on each rank."""
    names = list(importlib.import_module(module).CASES)
    return on_ranks(ranks, _run, module, names, seconds=240)


def verify(file: str, ranks: int, name: str) -> None:
    """Fails if a case of a file's ``CASES`` did on any rank."""
    module = Path(file).stem
    wrong = {rank: results[name] for rank, results in enumerate(outcomes(module, ranks)) if results[name]}
    if wrong:
        lines = [f"rank {rank}: {text}" for rank, texts in wrong.items() for text in texts[:5]]
        count = sum(len(texts) for texts in wrong.values())
        pytest.fail(f"{count} on {ranks} ranks\n" + "\n".join(lines), pytrace=False)
