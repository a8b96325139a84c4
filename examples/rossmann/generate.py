"""Makes data in the shape of the competition's: seven CSV files, the same for the same seed.

usage: python -m rossmann.generate FOLDER [--stores 1115] [--days 942] [--seed 0]     in the folder above this one

Sales follow what the real ones follow: the store, the weekday, the promotion, the season, the growth of the state,
holidays and the days around them, pay days, competitors, weather and interest on the web, and noise. Stores close on
Sundays and holidays, some for half a year; competition and promotion dates are missing where the real ones are.

How strong each of these is does not depend on the seed, which only draws the stores, the weather, the interest on the
web and the noise: else a season that happens to be strong would make one seed much easier than another. Summers and
schools are those of the states (SEASONS).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv

#: Values by column of a file.
Columns = dict[str, object]

STORES, DAYS = 1115, 942
LAST, TEST_DAYS = date(2015, 7, 31), 48
WEATHER_FROM, TREND_FROM, TREND_WEEKS = date(2013, 1, 1), date(2012, 12, 2), 148
# Name in the weather's file, state, suffix of the trend's file, share of the stores.
STATES = [
    ("BadenWuerttemberg", "BW", "BW", 73),
    ("Bayern", "BY", "BY", 180),
    ("Berlin", "BE", "BE", 92),
    ("Brandenburg", "BB", None, 0),
    ("Bremen", "HB", None, 0),
    ("Hamburg", "HH", "HH", 28),
    ("Hessen", "HE", "HE", 112),
    ("MecklenburgVorpommern", "MV", None, 0),
    ("Niedersachsen", "HB,NI", "NI", 22),
    ("NordrheinWestfalen", "NW", "NW", 286),
    ("RheinlandPfalz", "RP", "RP", 40),
    ("Saarland", "SL", "SL", 0),
    ("Sachsen", "SN", "SN", 75),
    ("SachsenAnhalt", "ST", "ST", 56),
    ("SchleswigHolstein", "SH", "SH", 115),
    ("Thueringen", "TH", "TH", 80),
]
# By state: what summer adds, and what school holidays add. By the sea summer is the season; cities are left.
SEASONS = {
    "BW": (-0.06, 0.05),
    "BY": (0.06, 0.09),
    "BE": (-0.12, 0.03),
    "HH": (-0.08, 0.07),
    "HE": (-0.10, 0.05),
    "HB,NI": (0.08, 0.08),
    "NW": (-0.09, 0.06),
    "RP": (0.05, 0.04),
    "SN": (0.04, 0.09),
    "ST": (-0.05, 0.03),
    "SH": (0.14, 0.10),
    "TH": (0.07, 0.08),
}
EASTER = {2013: date(2013, 3, 31), 2014: date(2014, 4, 20), 2015: date(2015, 4, 5)}
# Sunday is the last: its stores are of type b.
WEEKDAYS = np.array([0.16, 0.02, -0.03, 0.0, 0.05, -0.08, 0.10])
EVENTS = ["Rain", "Fog", "Snow", "Rain-Thunderstorm", "Fog-Rain", "Rain-Snow"]


@dataclass
class Calendar:
    """Days from the first of train to the last of test."""

    days: list[date]

    def __post_init__(self) -> None:
        self.numbers = np.array([day.toordinal() for day in self.days])
        self.weekday = np.array([day.isoweekday() for day in self.days])
        self.year_day = np.array([day.timetuple().tm_yday for day in self.days])
        self.month = np.array([day.month for day in self.days])
        self.day = np.array([day.day for day in self.days])
        self.years = (self.numbers - LAST.toordinal()) / 365.0
        self.is_test = self.numbers > LAST.toordinal()


def generate(
    folder: Path, stores: int = STORES, days: int = DAYS, seed: int = 0, told: Callable[[str], object] = str
) -> None:
    """Writes the seven files; ``days`` are those of train, the last ones.

    :param told: is called with the name of each file when it is written
    """
    if stores < 2 or not 400 <= days <= DAYS:
        raise ValueError(f"stores={stores}, days={days}: there are at least 2 stores, and from 400 to {DAYS} days")
    random = np.random.default_rng(seed)
    calendar = Calendar([LAST + timedelta(offset) for offset in range(1 - days, TEST_DAYS + 1)])
    folder.mkdir(parents=True, exist_ok=True)
    weather, trends, country = _weather(random), _trends(random), _walk(random, TREND_WEEKS, 70, 3)
    shops = _shops(random, stores)
    holiday, school = _holidays(calendar), _school(calendar)
    files = {
        **_weather_file(weather),
        **_trend_file(trends, country),
        **_store_files(shops),
        **_sales_files(random, calendar, shops, holiday, school, weather, trends),
    }
    for name, columns in files.items():
        csv.write_csv(pa.table(columns), folder / f"{name}.csv")
        told(f"{name}.csv")


def _walk(random: np.random.Generator, length: int, mean: float, step: float) -> np.ndarray:
    """A random walk that returns to its mean."""
    values = np.empty(length)
    value = mean + random.normal(0, 2 * step)
    for index in range(length):
        value += 0.12 * (mean - value) + random.normal(0, step)
        values[index] = value
    return values


def _weather(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Columns of states by days, from the first day of 2013 to the last of test."""
    first, last = WEATHER_FROM.toordinal(), LAST.toordinal() + TEST_DAYS
    season = np.cos(2 * np.pi * (np.arange(first, last + 1) - first - 200) / 365.25)
    shape = (len(STATES), season.size)
    # What all states share, and what each has of its own.
    wave = np.stack([_walk(random, season.size, 0, 1.6) for _ in STATES])
    mean = 10 + 9 * season + wave + _walk(random, season.size, 0, 1.2)
    spread = random.gamma(6, 0.8, shape)
    humidity = np.clip(72 - 8 * season + random.normal(0, 9, shape), 25, 100)
    wet = random.random(shape) < 0.45
    kind = random.integers(0, len(EVENTS), shape)
    cold = mean < 1
    event = np.where(wet, np.where(kind >= 3, kind, 0), np.where(random.random(shape) < 0.12, 1, -1))
    event = np.where(wet & cold, np.where(kind > 2, 5, 2), event)
    wind = random.gamma(5, 2.4, shape)
    return {
        "Mean_TemperatureC": np.round(mean),
        "Max_TemperatureC": np.round(mean + spread),
        "Min_TemperatureC": np.round(mean - spread),
        "Mean_Humidity": np.round(humidity),
        "Max_Humidity": np.round(np.minimum(100, humidity + random.gamma(4, 4, shape))),
        "Min_Humidity": np.round(np.maximum(10, humidity - random.gamma(4, 5, shape))),
        "Mean_Wind_SpeedKm_h": np.round(wind),
        "Max_Wind_SpeedKm_h": np.round(wind * random.uniform(1.3, 2.4, shape)),
        "CloudCover": np.where(random.random(shape) < 0.08, np.nan, np.round(np.clip(4 + 2 * wet + wave / 2, 0, 8))),
        "Precipitationmm": np.where(wet, np.round(random.gamma(1, 3, shape), 2), 0.0),
        "Events": event,
    }


def _trends(random: np.random.Generator) -> np.ndarray:
    """Interest on the web: states by weeks."""
    return np.stack([np.clip(np.round(_walk(random, TREND_WEEKS, 62, 5)), 0, 100) for _ in STATES])


def _some(random: np.random.Generator, stores: int, count: int) -> np.ndarray:
    """Which stores are such as ``count`` of the real ones are."""
    return random.permutation(stores) < round(count / STORES * stores)


def _shops(random: np.random.Generator, stores: int) -> dict[str, np.ndarray]:
    """One value for each store; what is not known to the files begins with an underscore."""
    shares = np.array([share for *_, share in STATES], float)
    state = random.choice(len(STATES), stores, p=shares / shares.sum())
    kind = random.choice(4, stores, p=[0.54, 0.016, 0.133, 0.311])
    assortment = np.where(kind == 1, random.integers(0, 3, stores), random.choice([0, 2], stores, p=[0.53, 0.47]))
    distance = np.round(np.maximum(20, random.lognormal(7.7, 1.2, stores)), -1)
    year = np.clip(np.round(2015 - random.gamma(1.6, 2.6, stores)), 1990, 2015)
    month = np.where(year == 2015, random.integers(1, 8, stores), random.integers(1, 13, stores))
    knows = ~_some(random, stores, 354)
    promo2 = _some(random, stores, 571)
    interval = random.choice(3, stores, p=[0.587, 0.228, 0.185])
    return {
        "state": state,
        "kind": kind,
        "assortment": assortment,
        "distance": np.where(_some(random, stores, 3), np.nan, distance),
        "competition_year": np.where(knows, year, np.nan),
        "competition_month": np.where(knows, month, np.nan),
        "promo2": promo2,
        "promo2_year": np.where(promo2, random.integers(2009, 2016, stores), np.nan),
        "promo2_week": np.where(promo2, random.integers(1, 51, stores), np.nan),
        "interval": np.where(promo2, interval, -1),
        "_level": random.normal(8.65, 0.28, stores) + np.array([0, 0.45, 0.02, -0.04])[kind] + 0.08 * (assortment == 2),
        "_promo": random.normal(0.30, 0.05, stores) + np.array([0.02, -0.18, 0.0, 0.06])[kind],
        "_rebuilt": _some(random, stores, 180),
        "_in_test": _some(random, stores, 856),
        "_sundays": (kind == 1) | (random.random(stores) < 0.008),
        "_growth": random.normal(0.03, 0.02, len(STATES))[state] + random.normal(0, 0.01, stores),
        "_summer": np.array([SEASONS.get(name, (0.0, 0.05))[0] for _, name, *_ in STATES])[state],
        "_school": np.array([SEASONS.get(name, (0.0, 0.05))[1] for _, name, *_ in STATES])[state],
    }


def _holidays(calendar: Calendar) -> np.ndarray:
    """0, or a, b, c: public holiday, Easter, Christmas; states by days."""
    found = np.full((len(STATES), len(calendar.days)), "0")
    index = {day: position for position, day in enumerate(calendar.days)}

    def mark(day: date, letter: str, states: str = "") -> None:
        if day in index:
            chosen = [not states or state in states.split() for _, state, *_ in STATES]
            found[chosen, index[day]] = letter

    for year, easter in EASTER.items():
        for month, day in ((1, 1), (5, 1), (10, 3)):
            mark(date(year, month, day), "a")
        mark(date(year, 1, 6), "a", "BW BY ST")
        mark(date(year, 8, 15), "a", "BY SL")
        mark(date(year, 10, 31), "a", "BB MV SN ST TH")
        mark(date(year, 11, 1), "a", "BW BY NW RP SL")
        for offset in (39, 50):
            mark(easter + timedelta(offset), "a")
        mark(easter + timedelta(60), "a", "BW BY HE NW RP SL")
        for offset in (-2, 1):
            mark(easter + timedelta(offset), "b")
        for day in (25, 26):
            mark(date(year, 12, day), "c")
    return found


def _school(calendar: Calendar) -> np.ndarray:
    """Whether schools are closed; states by days. Summer begins later in the south."""
    found = np.zeros((len(STATES), len(calendar.days)), bool)
    for state in range(len(STATES)):
        for year, easter in EASTER.items():
            starts = (180 + (state * 23) % 37, 44), (285 + (state * 5) % 20, 10), (357, 14), (-8, 14)
            for start, length in starts:
                first = date(year, 1, 1).toordinal() + start
                if start < 0:
                    first = easter.toordinal() + start
                found[state] |= (calendar.numbers >= first) & (calendar.numbers < first + length)
    found[:, calendar.weekday > 5] &= False
    return found


def _nearest(flags: np.ndarray, ahead: bool) -> np.ndarray:
    """Days to the next flag, or since the last one, up to 30."""
    result = np.full(flags.shape, 30)
    order = range(flags.shape[1] - 1, -1, -1) if ahead else range(flags.shape[1])
    count = np.full(flags.shape[0], 30)
    for day in order:
        count = np.where(flags[:, day], 0, np.minimum(30, count + 1))
        result[:, day] = count
    return result


def _sales_files(
    random: np.random.Generator,
    calendar: Calendar,
    shops: dict[str, np.ndarray],
    holiday: np.ndarray,
    school: np.ndarray,
    weather: dict[str, np.ndarray],
    trends: np.ndarray,
) -> dict[str, Columns]:
    """train and test; arrays are stores by days."""
    state, kind, stores, days = shops["state"], shops["kind"], shops["state"].size, len(calendar.days)
    column = {name: values[:, None] for name, values in shops.items()}
    promo = (((calendar.numbers - 1) // 7) % 2 == 0) & (calendar.weekday <= 5)
    is_holiday = holiday != "0"
    closed = is_holiday[state] | ((calendar.weekday == 7) & ~column["_sundays"])
    closed |= random.random((stores, days)) < 0.002

    log = column["_level"] + WEEKDAYS[calendar.weekday - 1] * np.array([1, 0.3, 1.2, 0.8])[kind][:, None]
    log = log + promo * column["_promo"] * (1 + 0.25 * (calendar.weekday == 1))
    # Seasons: Christmas, and a summer that is good in some states and bad in others.
    log += 0.45 * np.exp(-np.maximum(0, 358 - calendar.year_day) / 9) * (calendar.year_day <= 358)
    log += column["_summer"] * np.cos(2 * np.pi * (calendar.year_day - 225) / 365.25)
    log += column["_growth"] * calendar.years
    # Wages come at the end of the month, and last until its middle.
    log += 0.08 * np.cos(2 * np.pi * (calendar.day - 1) / 30)
    log += (
        0.18 * np.exp(-(_nearest(is_holiday, True) - 1) / 1.5)[state] - 0.06 * (_nearest(is_holiday, False) <= 2)[state]
    )
    log += column["_school"] * school[state]
    # A competitor takes more the nearer it is, and all of that after half a year.
    opened = np.array(
        [
            date(int(year), int(month), 15).toordinal() if year == year else 0
            for year, month in zip(shops["competition_year"], shops["competition_month"], strict=True)
        ]
    )[:, None]
    share = np.clip((calendar.numbers - opened) / 180, 0, 1) * (opened > 0)
    log -= 0.25 * np.exp(-np.nan_to_num(column["distance"], nan=1e5) / 4000) * share
    started = np.array(
        [
            date(int(year), 1, 1).toordinal() + (int(week) - 1) * 7 if year == year else 10**9
            for year, week in zip(shops["promo2_year"], shops["promo2_week"], strict=True)
        ]
    )[:, None]
    log += 0.10 * ((calendar.month % 3 == (column["interval"] + 1) % 3) & (calendar.numbers >= started))
    since = calendar.numbers - WEATHER_FROM.toordinal()
    temperature = weather["Mean_TemperatureC"][:, since][state]
    log += np.where(column["assortment"] == 2, 0.006, -0.003) * (temperature - 10)
    log -= 0.06 * (weather["Events"][:, since][state] == 0)
    week = (calendar.numbers - TREND_FROM.toordinal()) // 7
    # The files join on the ISO week, which begins a day later than the trend's.
    week = np.where(calendar.weekday == 7, week, week + 1)
    log += 0.006 * (trends[:, np.clip(week, 0, TREND_WEEKS - 1)][state] - 62)
    log += random.normal(0, 0.07, (stores, days))

    sales = np.where(closed | (random.random((stores, days)) < 5e-5), 0, np.round(np.exp(log))).astype(np.int64)
    customers = np.round(sales / np.exp(random.normal(2.2, 0.12, (stores, days)))).astype(np.int64)
    rebuilt = column["_rebuilt"] & (
        (calendar.numbers >= date(2014, 7, 1).toordinal()) & (calendar.numbers <= date(2014, 12, 31).toordinal())
    )
    # The files begin with the last day.
    order = np.arange(days)[::-1]
    day, store = (values.ravel() for values in np.meshgrid(order, np.arange(stores), indexing="ij"))
    in_train = ~calendar.is_test[day] & ~rebuilt[store, day]
    in_test = calendar.is_test[day] & shops["_in_test"][store]
    names = np.array([day.isoformat() for day in calendar.days])

    def columns(chosen: np.ndarray) -> Columns:
        at_day, at_store = day[chosen], store[chosen]
        return {
            "Store": at_store + 1,
            "DayOfWeek": calendar.weekday[at_day],
            "Date": names[at_day],
            "Sales": sales[at_store, at_day],
            "Customers": customers[at_store, at_day],
            "Open": (~closed[at_store, at_day]).astype(np.int64),
            "Promo": promo[at_day].astype(np.int64),
            "StateHoliday": holiday[state[at_store], at_day],
            "SchoolHoliday": school[state[at_store], at_day].astype(np.int64),
        }

    test = columns(in_test)
    del test["Sales"], test["Customers"]
    unknown = random.random(in_test.sum()) < 11 / 41088
    test = {"Id": np.arange(1, in_test.sum() + 1)} | test | {"Open": pa.array(test["Open"], mask=unknown)}
    return {"train": columns(in_train), "test": test}


def _weather_file(weather: dict[str, np.ndarray]) -> dict[str, Columns]:
    states, days = weather["Events"].shape
    dates = [(WEATHER_FROM + timedelta(day)).isoformat() for day in range(days)]
    flat = {name: values.ravel() for name, values in weather.items()}
    mean, wind = flat["Mean_TemperatureC"], flat["Max_Wind_SpeedKm_h"]
    whole = {name: _whole(values) for name, values in flat.items() if name not in ("Events", "Precipitationmm")}
    pressure = np.round(1016 + 6 * np.sin(np.arange(mean.size) / 5))
    columns: Columns = {
        "file": np.repeat([name for name, *_ in STATES], days),
        "Date": np.tile(dates, states),
        "Max_TemperatureC": whole["Max_TemperatureC"],
        "Mean_TemperatureC": whole["Mean_TemperatureC"],
        "Min_TemperatureC": whole["Min_TemperatureC"],
        "Dew_PointC": _whole(mean - 2),
        "MeanDew_PointC": _whole(mean - 4),
        "Min_DewpointC": _whole(mean - 6),
        "Max_Humidity": whole["Max_Humidity"],
        "Mean_Humidity": whole["Mean_Humidity"],
        "Min_Humidity": whole["Min_Humidity"],
        "Max_Sea_Level_PressurehPa": _whole(pressure + 3),
        "Mean_Sea_Level_PressurehPa": _whole(pressure),
        "Min_Sea_Level_PressurehPa": _whole(pressure - 3),
        "Max_VisibilityKm": _whole(np.full(mean.size, 31.0)),
        "Mean_VisibilityKm": _whole(np.full(mean.size, 12.0)),
        "Min_VisibilitykM": _whole(np.full(mean.size, 4.0)),
        "Max_Wind_SpeedKm_h": whole["Max_Wind_SpeedKm_h"],
        "Mean_Wind_SpeedKm_h": whole["Mean_Wind_SpeedKm_h"],
        "Max_Gust_SpeedKm_h": _whole(np.where(wind > 24, wind + 18, np.nan)),
        "Precipitationmm": flat["Precipitationmm"],
        "CloudCover": whole["CloudCover"],
        "Events": [EVENTS[event] if event >= 0 else None for event in flat["Events"]],
        "WindDirDegrees": (np.arange(mean.size) * 37) % 361,
    }
    return {"weather": columns}


def _trend_file(trends: np.ndarray, country: np.ndarray) -> dict[str, Columns]:
    starts = [TREND_FROM + timedelta(7 * week) for week in range(TREND_WEEKS)]
    weeks = [f"{start.isoformat()} - {(start + timedelta(6)).isoformat()}" for start in starts]
    rows = [(f"Rossmann_DE_{suffix}", trends[index]) for index, (_, _, suffix, _) in enumerate(STATES) if suffix]
    rows.insert(0, ("Rossmann_DE", np.clip(np.round(country), 0, 100)))
    columns = {
        "file": np.repeat([name for name, _ in rows], TREND_WEEKS),
        "week": weeks * len(rows),
        "trend": np.concatenate([values for _, values in rows]).astype(np.int64),
    }
    return {"googletrend": columns}


def _store_files(shops: dict[str, np.ndarray]) -> dict[str, Columns]:
    numbers = np.arange(1, shops["state"].size + 1)
    intervals = ["Jan,Apr,Jul,Oct", "Feb,May,Aug,Nov", "Mar,Jun,Sept,Dec"]
    store = {
        "Store": numbers,
        "StoreType": np.array(list("abcd"))[shops["kind"]],
        "Assortment": np.array(list("abc"))[shops["assortment"]],
        "CompetitionDistance": _whole(shops["distance"]),
        "CompetitionOpenSinceMonth": _whole(shops["competition_month"]),
        "CompetitionOpenSinceYear": _whole(shops["competition_year"]),
        "Promo2": shops["promo2"].astype(np.int64),
        "Promo2SinceWeek": _whole(shops["promo2_week"]),
        "Promo2SinceYear": _whole(shops["promo2_year"]),
        "PromoInterval": [intervals[index] if index >= 0 else None for index in shops["interval"]],
    }
    names = np.array([state for _, state, *_ in STATES])
    return {
        "store": store,
        "store_states": {"Store": numbers, "State": names[shops["state"]]},
        "state_names": {"StateName": [name for name, *_ in STATES], "State": names},
    }


def _whole(values: np.ndarray) -> pa.Array:
    """Whole numbers, null where there is none."""
    missing = np.isnan(values)
    return pa.array(np.where(missing, 0, values).astype(np.int64), mask=missing)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stores", type=int, default=STORES)
    parser.add_argument("--days", type=int, default=DAYS, help=f"days of train.csv, the last of {DAYS}")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generate(arguments.folder, arguments.stores, arguments.days, arguments.seed)


if __name__ == "__main__":
    main()
