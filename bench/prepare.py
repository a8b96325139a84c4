"""The Rossmann example's preparation beside the same steps in pandas and in Polars.

usage: prepare.py OUT FOLDER REPETITIONS STORES

Writes OUT, one line of JSON for each contestant: what is measured, who, rows of train.csv and test.csv, and nanoseconds
by repetition, from the seven CSV files to the three Parquet data sets. A wrong result ends the run: all values of all
contestants are compared. Contestants take turns in each repetition. 1,115 stores have a million rows.

The steps are those of examples/rossmann/prepare.sql, as someone who knows the library would write them there: columns
that are needed, their types given and not guessed, no function that sees a row, and joins only where there is another
table. All write the same rows in the same order with the same compression.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from rossmann import generate
from rossmann.engines import ROW_GROUP, DataFusion
from rossmann.prepare import prepare
from rossmann.tables import CATEGORICAL, CONTINUOUS, TABLES

PARTS = ("train", "validation", "test")
TEXTS = {"State", "StoreType", "Assortment", "PromoInterval", "Events"}
FLAGS = ("Promo", "StateHoliday", "SchoolHoliday")
#: Days of one, and that of a date which is missing.
YEAR, NEVER = 365, 1900


def fail(what: str) -> None:
    """Ends the run."""
    raise SystemExit(f"prepare: {what}")


def with_us(data: Path, folder: Path) -> None:
    """DataFusion, with the example's checks of what the files hold."""
    prepare(DataFusion(), data, folder)


def with_pandas(data: Path, folder: Path) -> None:
    """pandas, which reads with Arrow's parser, its fastest."""
    types = {"INT": "float64", "DOUBLE": "float64", "STRING": "string[pyarrow]", "DATE": "string[pyarrow]"}

    def read(table: str, **own: str) -> pd.DataFrame:
        columns = {column: types[kind] for column, kind in TABLES[table].items()} | own
        frame = pd.read_csv(data / f"{table}.csv", usecols=list(columns), dtype=columns, engine="pyarrow")
        for column, kind in TABLES[table].items():
            if kind == "DATE":
                frame[column] = pd.to_datetime(frame[column], format="%Y-%m-%d")
        return frame

    def dated(frame: pd.DataFrame) -> pd.DataFrame:
        when = frame["Date"].dt
        return frame.assign(
            Year=when.year, Month=when.month, Week=when.isocalendar().week.astype("int32"), Day=when.day
        )

    whole = {"Store": "int32", "DayOfWeek": "int32"}
    train = read("train", **whole, Sales="int32").assign(Part="train")
    test = read("test", **whole, Id="int32").assign(Part="test")
    frame = dated(pd.concat([train, test], ignore_index=True))
    rows = len(frame)
    for flag in FLAGS:
        frame[flag] = (frame[flag] != "0").astype(bool)

    trends = read("googletrend")
    trends["Date"] = pd.to_datetime(trends["week"].str.split(" -").str[0], format="%Y-%m-%d")
    trends["State"] = trends["file"].str.removeprefix("Rossmann_DE").str.removeprefix("_").replace("NI", "HB,NI")
    trends = dated(trends)[["State", "Year", "Week", "trend"]]
    country = trends[trends["State"] == ""].drop(columns="State").rename(columns={"trend": "trend_de"})
    stores = read("store", Store="int32").merge(read("store_states", Store="int32"), on="Store")
    missing = {
        "CompetitionOpenSinceYear": NEVER,
        "CompetitionOpenSinceMonth": 1,
        "Promo2SinceYear": NEVER,
        "Promo2SinceWeek": 1,
    }
    stores = stores.fillna(missing).astype(dict.fromkeys(missing, "int32"))
    since = {"year": stores["CompetitionOpenSinceYear"], "month": stores["CompetitionOpenSinceMonth"], "day": 15}
    stores["CompetitionSince"] = pd.to_datetime(pd.DataFrame(since))
    first = pd.to_datetime(pd.DataFrame({"year": stores["Promo2SinceYear"], "month": 1, "day": 1}))
    stores["Promo2Since"] = first + pd.to_timedelta((stores["Promo2SinceWeek"] - 1) * 7, unit="D")
    weather = read("weather").merge(read("state_names"), left_on="file", right_on="StateName")
    weather = weather.drop(columns=["file", "StateName"])

    for other, keys in (
        (stores, ["Store"]),
        (trends, ["State", "Year", "Week"]),
        (country, ["Year", "Week"]),
        (weather, ["State", "Date"]),
    ):
        frame = frame.merge(other, on=keys, validate="many_to_one")
        if len(frame) != rows:
            fail(f"pandas has lost rows in the join by {keys}")

    for name, since_when, most, unit, year in (
        ("CompetitionMonthsOpen", "CompetitionSince", 720, 30, "CompetitionOpenSinceYear"),
        ("Promo2Weeks", "Promo2Since", 175, 7, "Promo2SinceYear"),
    ):
        days = (frame["Date"] - frame[since_when]).dt.days.clip(0, most).where(frame[year] > NEVER, 0)
        frame[name] = days // unit

    frame = frame.sort_values(["Store", "Date"], ignore_index=True)
    day = (frame["Date"] - pd.Timestamp(0)).dt.days
    by_store = day.groupby(frame["Store"])
    first_day, last_day = by_store.transform("min"), by_store.transform("max")
    for flag in FLAGS:
        flagged = day.where(frame[flag]).groupby(frame["Store"])
        frame[f"After{flag}"] = day - flagged.ffill().fillna(first_day)
        frame[f"Before{flag}"] = day - flagged.bfill().fillna(last_day)

    kept = (frame["Part"] == "test") | (frame["Sales"] > 0)
    frame, day = frame[kept].copy(), day[kept]
    vocabulary = {}
    for column in CATEGORICAL:
        if column in TEXTS:
            frame[column] = frame[column].fillna("")
        codes, values = pd.factorize(frame[column], sort=True)
        frame[column], vocabulary[column] = codes.astype("int32"), values.tolist()
    frame[CONTINUOUS] = frame[CONTINUOUS].fillna(0).astype("float32")
    frame["Sales"] = frame["Sales"].astype("float32")

    is_test = frame["Part"] == "test"
    held_out = ~is_test & (day >= day[is_test].min() - YEAR) & (day < day[is_test].max() - YEAR)
    columns = ["Date", *CATEGORICAL, *CONTINUOUS]
    order = ["Date", "Store"]
    parts = {
        "train": frame.loc[~is_test & ~held_out, [*columns, "Sales"]].sort_values(order),
        "validation": frame.loc[held_out, [*columns, "Sales"]].sort_values(order),
        "test": frame.loc[is_test, ["Id", *columns]].astype({"Id": "int32"}).sort_values("Id"),
    }
    for part, found in parts.items():
        (folder / part).mkdir(parents=True)
        found.to_parquet(folder / part / "part-00000.parquet", index=False, row_group_size=ROW_GROUP)
    write_metadata(folder, vocabulary, float(parts["train"]["Sales"].max()), {part: len(parts[part]) for part in PARTS})


def with_polars(data: Path, folder: Path) -> None:
    """Polars, lazily up to the numbers of categories."""
    types = {"INT": pl.Int32, "DOUBLE": pl.Float64, "STRING": pl.String, "DATE": pl.Date}

    def read(table: str) -> pl.LazyFrame:
        schema = {column: types[kind] for column, kind in TABLES[table].items()}
        return pl.scan_csv(data / f"{table}.csv", schema_overrides=schema, infer_schema=False).select(*schema)

    when = pl.col("Date").dt
    parts_of_date = {"Year": when.year(), "Month": when.month(), "Week": when.week(), "Day": when.day()}
    frame = pl.concat(
        [read("train").with_columns(Part=pl.lit("train")), read("test").with_columns(Part=pl.lit("test"))],
        how="diagonal",
    ).with_columns(Number=when.epoch("d"), **parts_of_date, **{flag: pl.col(flag) != "0" for flag in FLAGS})

    trends = read("googletrend").with_columns(
        Date=pl.col("week").str.split(" -").list.first().str.to_date("%Y-%m-%d"),
        State=pl.col("file").str.strip_prefix("Rossmann_DE").str.strip_prefix("_").replace("NI", "HB,NI"),
    )
    trends = trends.select("State", "trend", Year=when.year(), Week=when.week())
    country = trends.filter(State="").select("Year", "Week", trend_de="trend")
    stores = (
        read("store")
        .join(read("store_states"), on="Store")
        .with_columns(
            pl.col("CompetitionOpenSinceYear", "Promo2SinceYear").fill_null(NEVER),
            pl.col("CompetitionOpenSinceMonth", "Promo2SinceWeek").fill_null(1),
        )
        .with_columns(
            CompetitionSince=pl.date("CompetitionOpenSinceYear", "CompetitionOpenSinceMonth", 15).dt.epoch("d"),
            Promo2Since=pl.date("Promo2SinceYear", 1, 1).dt.epoch("d") + (pl.col("Promo2SinceWeek") - 1) * 7,
        )
    )
    weather = read("weather").join(read("state_names"), left_on="file", right_on="StateName")

    number = pl.col("Number")
    for other, keys in (
        (stores, ["Store"]),
        (trends, ["State", "Year", "Week"]),
        (country, ["Year", "Week"]),
        (weather, ["State", "Date"]),
    ):
        frame = frame.join(other, on=keys, validate="m:1")

    def elapsed(since: str, most: int, unit: int, year: str) -> pl.Expr:
        return pl.when(pl.col(year) > NEVER).then((number - pl.col(since)).clip(0, most)).otherwise(0) // unit

    frame = frame.with_columns(
        CompetitionMonthsOpen=elapsed("CompetitionSince", 720, 30, "CompetitionOpenSinceYear"),
        Promo2Weeks=elapsed("Promo2Since", 175, 7, "Promo2SinceYear"),
    ).sort("Store", "Date")
    near = {}
    for flag in FLAGS:
        flagged = pl.when(pl.col(flag)).then(number)
        near[f"After{flag}"] = number - flagged.forward_fill().fill_null(number.min()).over("Store")
        near[f"Before{flag}"] = number - flagged.backward_fill().fill_null(number.max()).over("Store")
    found = (
        frame.with_columns(**near)
        .filter((pl.col("Part") == "test") | (pl.col("Sales") > 0))
        .with_columns(pl.col(CONTINUOUS).fill_null(0).cast(pl.Float32), pl.col("Sales").cast(pl.Float32))
        .with_columns(pl.col([c for c in CATEGORICAL if c in TEXTS]).fill_null(""))
        .select("Part", "Number", "Id", "Date", *CATEGORICAL, *CONTINUOUS, "Sales")
        .collect()
    )
    vocabulary = {column: found[column].unique().sort() for column in CATEGORICAL}
    numbered = {
        column: values.search_sorted(found[column]).cast(pl.Int32)
        if found[column].dtype != pl.Boolean
        else found[column].cast(pl.Int32)
        for column, values in vocabulary.items()
    }
    found = found.with_columns(**numbered)

    test = found.filter(Part="test")
    first, last = test["Number"].min() - YEAR, test["Number"].max() - YEAR
    held_out = (number >= first) & (number < last)
    train = found.filter(Part="train")
    columns = ["Date", *CATEGORICAL, *CONTINUOUS]
    parts = {
        "train": train.filter(~held_out).select(*columns, "Sales").sort("Date", "Store"),
        "validation": train.filter(held_out).select(*columns, "Sales").sort("Date", "Store"),
        "test": test.select("Id", *columns).sort("Id"),
    }
    for part, rows in parts.items():
        (folder / part).mkdir(parents=True)
        rows.write_parquet(folder / part / "part-00000.parquet", compression="snappy", row_group_size=ROW_GROUP)
    lists = {column: values.to_list() for column, values in vocabulary.items()}
    write_metadata(folder, lists, parts["train"]["Sales"].max(), {part: len(parts[part]) for part in PARTS})


def write_metadata(folder: Path, vocabulary: dict[str, list[Any]], max_sales: float, rows: dict[str, int]) -> None:
    """As the example has it."""
    metadata = {"vocabulary": vocabulary, "max_sales": max_sales, "rows": rows}
    (folder / "metadata.json").write_text(json.dumps(metadata))


CONTESTANTS: dict[str, Callable[[Path, Path], None]] = {
    "ours": with_us,
    "pandas": with_pandas,
    "Polars": with_polars,
}


def check(ours: Path, other: Path, who: str) -> None:
    """Ends the run unless both hold the same."""
    mine, theirs = (json.loads((folder / "metadata.json").read_text()) for folder in (ours, other))
    mine, theirs = ({**one, **one.pop("vocabulary")} for one in (mine, theirs))
    for what in mine:
        if mine[what] != theirs[what]:
            fail(f"{who} has for {what}: {theirs[what]}, and we have {mine[what]}")
    for part in PARTS:
        expected, found = (pq.read_table(folder / part) for folder in (ours, other))
        if expected.column_names != found.column_names or expected.num_rows != found.num_rows:
            fail(f"{who} has {found.num_rows} rows of {found.column_names} in {part}")
        for column in expected.column_names:
            values = [table[column].to_numpy() for table in (expected, found)]
            if column == "Date":
                values = [days.astype("datetime64[D]").astype(np.int64) for days in values]
            if not np.allclose(*values, rtol=1e-6, atol=1e-6):
                row = int(np.argmax(~np.isclose(*values, rtol=1e-6, atol=1e-6)))
                fail(f"{who} has {values[1][row]} in {part}, {column}, row {row}, and we have {values[0][row]}")


def measure(folder: Path, data: Path, repetitions: int) -> dict[str, list[int]]:
    """All repetitions of all contestants, the first of which is checked."""
    times: dict[str, list[int]] = {who: [] for who in CONTESTANTS}
    # A single repetition only checks that everything works; else what is loaded at first use is not measured.
    for repetition in range(-1 if repetitions > 1 else 0, repetitions):
        order = list(CONTESTANTS.items())
        # Back and forth, so that nobody always runs after the same neighbour.
        for who, call in order if repetition % 2 == 0 else reversed(order):
            out = folder / who
            shutil.rmtree(out, ignore_errors=True)
            start = monotonic_ns()
            call(data, out)
            took = monotonic_ns() - start
            print(f"prepare, {who}: {took / 1e9:.3f} s", flush=True)
            if repetition >= 0:
                times[who].append(took)
        for who in list(CONTESTANTS)[1:]:
            check(folder / "ours", folder / who, who)
    return times


def main() -> None:
    """Makes the files, then measures."""
    out, folder = Path(sys.argv[1]), Path(sys.argv[2])
    repetitions, stores = map(int, sys.argv[3:])
    data = folder / "data"
    generate.generate(data, stores)
    rows = sum(1 for table in ("train", "test") for _ in (data / f"{table}.csv").open("rb")) - 2
    times = measure(folder, data, repetitions)
    lines = [json.dumps(["prepare", who, rows, found]) for who, found in times.items()]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
