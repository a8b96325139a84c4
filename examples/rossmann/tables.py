"""What the seven files hold, which columns the network sees, and the errors for files that do not hold it."""

from __future__ import annotations

import csv
from pathlib import Path

#: Columns that are read, with their types in SQL, by file. Others may be there.
TABLES: dict[str, dict[str, str]] = {
    "train": {
        "Store": "INT",
        "DayOfWeek": "INT",
        "Date": "DATE",
        "Sales": "INT",
        "Promo": "STRING",
        "StateHoliday": "STRING",
        "SchoolHoliday": "STRING",
    },
    "test": {
        "Id": "INT",
        "Store": "INT",
        "DayOfWeek": "INT",
        "Date": "DATE",
        "Promo": "STRING",
        "StateHoliday": "STRING",
        "SchoolHoliday": "STRING",
    },
    "store": {
        "Store": "INT",
        "StoreType": "STRING",
        "Assortment": "STRING",
        "CompetitionDistance": "DOUBLE",
        "CompetitionOpenSinceMonth": "INT",
        "CompetitionOpenSinceYear": "INT",
        "Promo2SinceWeek": "INT",
        "Promo2SinceYear": "INT",
        "PromoInterval": "STRING",
    },
    "store_states": {"Store": "INT", "State": "STRING"},
    "state_names": {"StateName": "STRING", "State": "STRING"},
    "googletrend": {"file": "STRING", "week": "STRING", "trend": "DOUBLE"},
    "weather": {
        "file": "STRING",
        "Date": "DATE",
        "Max_TemperatureC": "DOUBLE",
        "Mean_TemperatureC": "DOUBLE",
        "Min_TemperatureC": "DOUBLE",
        "Max_Humidity": "DOUBLE",
        "Mean_Humidity": "DOUBLE",
        "Min_Humidity": "DOUBLE",
        "Max_Wind_SpeedKm_h": "DOUBLE",
        "Mean_Wind_SpeedKm_h": "DOUBLE",
        "CloudCover": "DOUBLE",
        "Events": "STRING",
    },
}
WORDS = {"INT": "a whole number", "DOUBLE": "a number", "DATE": "a date (year-month-day)"}

CATEGORICAL = [
    "Store",
    "State",
    "DayOfWeek",
    "Year",
    "Month",
    "Day",
    "Week",
    "CompetitionMonthsOpen",
    "Promo2Weeks",
    "StoreType",
    "Assortment",
    "PromoInterval",
    "CompetitionOpenSinceYear",
    "Promo2SinceYear",
    "Events",
    "Promo",
    "StateHoliday",
    "SchoolHoliday",
]
CONTINUOUS = [
    "CompetitionDistance",
    "Max_TemperatureC",
    "Mean_TemperatureC",
    "Min_TemperatureC",
    "Max_Humidity",
    "Mean_Humidity",
    "Min_Humidity",
    "Max_Wind_SpeedKm_h",
    "Mean_Wind_SpeedKm_h",
    "CloudCover",
    "trend",
    "trend_de",
    "BeforePromo",
    "AfterPromo",
    "BeforeStateHoliday",
    "AfterStateHoliday",
    "BeforeSchoolHoliday",
    "AfterSchoolHoliday",
]


class BadInputError(ValueError):
    """A file is missing or does not hold what it should; the message says which and what to do."""


def headers(data: Path) -> dict[str, list[str]]:
    """The columns of all seven files, in their order, after a check that what is needed is there."""
    found = {}
    missing = [f"{table}.csv" for table in TABLES if not (data / f"{table}.csv").is_file()]
    if missing:
        raise BadInputError(
            f"{data} has no {', '.join(missing)}: give the folder with the competition's files, or leave --data out to "
            "run on generated ones"
        )
    for table, columns in TABLES.items():
        with open(data / f"{table}.csv", newline="", encoding="utf-8-sig", errors="replace") as file:
            found[table] = next(csv.reader(file), [])
        lost = [column for column in columns if column not in found[table]]
        if lost:
            raise BadInputError(
                f"{table}.csv has no column {', '.join(lost)}: its first line must name the columns, and it names "
                f"{', '.join(found[table])[:200] or 'none'}"
            )
    return found


def broken(path: Path, columns: int) -> str | None:
    """The first line that is not one of so many fields, in words; looked for when an engine could not read the file."""
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        lines = csv.reader(file, strict=True)
        try:
            for fields in lines:
                if any(not field.isascii() and "\ufffd" in _decoded(field) for field in fields):
                    return f"line {lines.line_num} is not text in UTF-8"
                if fields and len(fields) != columns:
                    return f"line {lines.line_num} has {len(fields)} fields, and the first line names {columns}"
        except csv.Error as error:
            return f"line {lines.line_num}: {error}"
    return None


def _decoded(field: str) -> str:
    return field.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
