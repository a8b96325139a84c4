"""The engines that run the preparation: DataFusion in this process, or a Spark session."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

#: Rows of a row group: what one task reads at a time.
ROW_GROUP = 1 << 16


class DataFusion:
    """DataFusion, from its own wheel."""

    WORDS: ClassVar = {"days": "CAST({} AS INT)", "values_of": "array_agg(DISTINCT {})"}

    def __init__(self) -> None:
        from datafusion import SessionConfig, SessionContext

        # Names are those of the files, capitals included.
        self._context = SessionContext(SessionConfig({"datafusion.sql_parser.enable_ident_normalization": "false"}))

    def read_csv(self, name: str, path: Path, columns: Sequence[str]) -> None:
        """A file as a table of texts, empty ones being null."""
        schema = pa.schema([(column, pa.string()) for column in columns])
        self._context.register_csv(name, str(path), schema=schema, has_header=True)

    def view(self, name: str, query: str) -> None:
        """A name for a query."""
        self._context.register_view(name, self._sql(query))

    def keep(self, name: str, query: str) -> None:
        """A name for the rows of a query, computed once."""
        self._context.register_view(name, self._sql(query).cache())

    def table(self, name: str, columns: dict[str, Sequence[Any]]) -> None:
        """A small table of values from here."""
        self._context.register_record_batches(name, [pa.table(columns).to_batches()])

    def rows(self, query: str) -> list[dict[str, Any]]:
        """The rows of a query, few."""
        return self._sql(query).to_arrow_table().to_pylist()

    def write(self, query: str, folder: Path) -> int:
        """The rows of a query as Parquet, in its order; returns how many."""
        folder.mkdir(parents=True)
        count = 0
        frame = self._sql(query)
        with pq.ParquetWriter(folder / "part-00000.parquet", frame.schema()) as writer:
            for batch in frame.execute_stream():
                table = pa.Table.from_batches([batch.to_pyarrow()])
                count += table.num_rows
                writer.write_table(table, row_group_size=ROW_GROUP)
        return count

    def _sql(self, query: str) -> Any:
        return self._context.sql(_translated(query, self.WORDS))


class Spark:
    """The Spark session that there is, or a new one with this master."""

    WORDS: ClassVar = {"days": "unix_date({})", "values_of": "collect_set({})"}

    def __init__(self, master: str) -> None:
        from pyspark.sql import SparkSession

        if master.startswith("local"):
            # Its tasks run in this environment, not in that of the first python3 there is.
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = SparkSession.builder.master(master).appName("rossmann")
        self.session = builder.config("spark.sql.shuffle.partitions", 16).getOrCreate()

    def read_csv(self, name: str, path: Path, columns: Sequence[str]) -> None:
        """A file as a table of texts, empty ones being null."""
        schema = ", ".join(f"`{column}` STRING" for column in columns)
        # Every field is looked at, also those that nobody asks for: a line with too few is an error.
        reader = self.session.read.options(header=True, mode="FAILFAST", columnPruning=False)
        reader.csv(str(path.absolute()), schema=schema).createOrReplaceTempView(name)

    def view(self, name: str, query: str) -> None:
        """A name for a query."""
        self._sql(query).createOrReplaceTempView(name)

    def keep(self, name: str, query: str) -> None:
        """A name for the rows of a query, computed once."""
        self._sql(query).cache().createOrReplaceTempView(name)

    def table(self, name: str, columns: dict[str, Sequence[Any]]) -> None:
        """A small table of values from here."""
        rows = list(zip(*columns.values(), strict=True))
        self.session.createDataFrame(rows, list(columns)).createOrReplaceTempView(name)

    def rows(self, query: str) -> list[dict[str, Any]]:
        """The rows of a query, few."""
        return [row.asDict() for row in self._sql(query).collect()]

    def write(self, query: str, folder: Path) -> int:
        """The rows of a query as Parquet, in its order; returns how many."""
        self._sql(query).write.parquet(str(folder.absolute()))
        return int(self.session.read.parquet(str(folder.absolute())).count())

    def _sql(self, query: str) -> Any:
        return self.session.sql(_translated(query, self.WORDS))


Engine = DataFusion | Spark


def _translated(query: str, words: dict[str, str]) -> str:
    """A query in the words of an engine: days since 1970, and the different values of a column."""
    for word, expression in words.items():
        query = re.sub(rf"\b{word}\((\w+)\)", lambda found, own=expression: own.format(found[1]), query)
    return query
