"""From the seven CSV files to three Parquet data sets of features: training, validation and test.

The steps are in prepare.sql. What is written is whole or not there. Rows without sales are left out of training; no
other row is lost or doubled, or the error says at which join.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .engines import Engine
from .files import whole_folder
from .tables import CATEGORICAL, CONTINUOUS, TABLES, WORDS, BadInputError, broken, headers

#: What must have one row for each day of each store, and what finds it.
JOINS = {
    "store.csv and store_states.csv, by Store": "dated JOIN since ON dated.Store = since.Store",
    "googletrend.csv, by state and week": "with_stores JOIN trends ON with_stores.State = trends.State "
    "AND with_stores.Year = trends.Year AND with_stores.Week = trends.Week",
    "googletrend.csv (Rossmann_DE), by week": "with_stores JOIN trends_de ON with_stores.Year = trends_de.Year "
    "AND with_stores.Week = trends_de.Week",
    "weather.csv and state_names.csv, by state and Date": "with_stores JOIN climate "
    "ON with_stores.State = climate.State AND with_stores.Date = climate.Date",
}
#: Columns of the tables from texts, by type; what is not a number is null.
READ = {
    "STRING": "{}",
    "INT": "CAST({} AS INT)",
    "DATE": "CAST({} AS DATE)",
    "DOUBLE": "nullif(CAST({} AS DOUBLE), CAST('NaN' AS DOUBLE))",
}


@dataclass
class Prepared:
    """What training needs to know of the data sets."""

    folder: str
    #: Values of each category; the position of a value is its number, and one past the last is what is not there.
    vocabulary: dict[str, list[Any]]
    max_sales: float
    rows: dict[str, int]

    @staticmethod
    def load(folder: Path) -> Prepared:
        """What ``prepare`` has written there."""
        return Prepared(folder=str(folder), **json.loads((folder / "metadata.json").read_text()))


#: What ``prepare`` tells, one after the other.
STEPS = ["files are read", "rows are joined", "categories are numbered", "train", "validation", "test"]


def prepare(
    engine: Engine,
    data: Path,
    folder: Path,
    vocabulary: dict[str, list[Any]] | None = None,
    told: Callable[[str], object] = str,
) -> Prepared:
    """Reads the files in ``data`` and writes ``train``, ``validation`` and ``test`` in ``folder``.

    :param vocabulary: that of a model which is to predict; if not said, the values that occur in train and test
    :param told: is called with each of ``STEPS`` when it is done
    """
    read(engine, data)
    told("files are read")
    for name, query in steps().items():
        if name == "joined":
            engine.keep(name, query)
            check_rows(engine)
        else:
            engine.view(name, query)
    told("rows are joined")
    words = vocabulary or vocabularies(engine)
    for column, values in words.items():
        engine.table(f"vocabulary_{column.lower()}", {"value": values, "position": list(range(len(values)))})
    engine.keep("encoded", encoding(words))
    told("categories are numbered")

    first, last = one(
        engine, "SELECT min(DayNumber) AS first, max(DayNumber) AS last FROM features WHERE Part = 'test'"
    )
    if first is None:
        raise BadInputError("test.csv has no rows: there is nothing to predict")
    held_out = f"DayNumber >= {first - 365} AND DayNumber < {last - 365}"
    columns = ", ".join(["Date", *CATEGORICAL, *CONTINUOUS])
    parts = {
        "train": f"SELECT {columns}, Sales FROM encoded WHERE Part = 'train' AND NOT ({held_out}) ORDER BY Date, Store",
        "validation": f"SELECT {columns}, Sales FROM encoded WHERE Part = 'train' AND {held_out} ORDER BY Date, Store",
        "test": f"SELECT Id, {columns} FROM encoded WHERE Part = 'test' ORDER BY Id",
    }
    with whole_folder(folder) as partial:
        rows = {}
        for part, query in parts.items():
            rows[part] = engine.write(query, partial / part)
            told(part)
        for part, reason in {
            "train": "no day with sales outside of the validation period",
            "validation": "no day with sales one year before the days of test.csv",
        }.items():
            if not rows[part]:
                raise BadInputError(f"train.csv has {reason}: it must reach back more than a year before test.csv")
        (max_sales,) = one(engine, f"SELECT max(Sales) AS most FROM features WHERE Part = 'train' AND NOT ({held_out})")
        prepared = Prepared(str(folder), words, float(max_sales), rows)
        metadata = {name: value for name, value in asdict(prepared).items() if name != "folder"}
        (partial / "metadata.json").write_text(json.dumps(metadata))
    return prepared


def steps() -> dict[str, str]:
    """The queries of prepare.sql by name, in their order."""
    text = Path(__file__).with_name("prepare.sql").read_text()
    blocks = re.findall(r"^-- (\w+): .*\n((?:(?!-- ).*\n)+?)(?=\n|\Z)", text, re.MULTILINE)
    return {name: query.strip().removesuffix(";") for name, query in blocks}


def read(engine: Engine, data: Path) -> None:
    """Makes the files tables of the engine, with types; a value that is not of its type is an error."""
    for table, names in headers(data).items():
        engine.read_csv(f"{table}_csv", data / f"{table}.csv", names)
        columns = TABLES[table]
        typed = {column: type for column, type in columns.items() if type != "STRING"}
        wrong = [
            f"max(CASE WHEN try_cast({column} AS {type}) IS NULL THEN {column} END) AS {column}"
            for column, type in typed.items()
        ]
        try:
            (found,) = engine.rows(f"SELECT {', '.join(wrong) or 'count(*)'} FROM {table}_csv")
        except Exception as error:
            why = broken(data / f"{table}.csv", len(names)) or str(error).splitlines()[0]
            raise BadInputError(f"{table}.csv cannot be read: {why}: mend the file, or fetch it again") from error
        for column, type in typed.items():
            if found[column] is not None:
                raise BadInputError(
                    f"{table}.csv: {found[column]!r} in column {column} is not {WORDS[type]}: mend that row"
                )
        values = ", ".join(READ[type].format(column) + f" AS {column}" for column, type in columns.items())
        engine.view(table, f"SELECT {values} FROM {table}_csv")


def check_rows(engine: Engine) -> None:
    """Every row is there once after the joins, or the first join that is to blame is named."""
    (before,) = one(engine, "SELECT count(*) AS found FROM sold")
    (after,) = one(engine, "SELECT count(*) AS found FROM joined")
    for files, join in JOINS.items() if before != after else ():
        (now,) = one(engine, f"SELECT count(*) AS found FROM {join}")
        if now != before:
            what = "no row there" if now < before else "more than one row there"
            raise BadInputError(
                f"{before} rows of train.csv and test.csv became {now} in the join with {files}: some have {what}"
            )
    (days,) = one(engine, "SELECT count(*) AS found FROM (SELECT DISTINCT Store, DayNumber FROM joined) AS days")
    if days != before:
        raise BadInputError(
            f"train.csv and test.csv have {before} rows for {days} days of stores: each must be there once, in one of "
            "them"
        )


def vocabularies(engine: Engine) -> dict[str, list[Any]]:
    """The sorted values of each category over train and test."""
    columns = ", ".join(f"values_of({column}) AS {column}" for column in CATEGORICAL)
    return {column: sorted(values) for column, values in engine.rows(f"SELECT {columns} FROM features")[0].items()}


def encoding(vocabulary: dict[str, list[Any]]) -> str:
    """The query that makes numbers of categories."""
    numbers = [
        f"CAST(coalesce(of_{column}.position, {len(values)}) AS INT) AS {column}"
        for column, values in vocabulary.items()
    ]
    floats = [f"CAST({column} AS FLOAT) AS {column}" for column in CONTINUOUS]
    joins = [
        f"LEFT JOIN vocabulary_{column.lower()} AS of_{column} ON features.{column} = of_{column}.value"
        for column in vocabulary
    ]
    return f"SELECT Part, Id, Date, DayNumber, Sales, {', '.join(numbers + floats)} FROM features {' '.join(joins)}"


def one(engine: Engine, query: str) -> tuple[Any, ...]:
    """The only row of a query."""
    return tuple(engine.rows(query)[0].values())
