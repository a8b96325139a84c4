"""The Rossmann example: its data, its preparation on both engines, training on n ranks, prediction, bad input."""

# ruff: noqa: E402  what is not installed is asked for first
from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for module in ("datafusion", "pyarrow", "torch"):
    pytest.importorskip(module, reason=f"the example needs {module}: pip install {module}")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import deuteron
import deuteron.torch as hvd
import pyarrow.parquet as pq
from rossmann import __main__ as demo
from rossmann import generate, predict
from rossmann.engines import DataFusion, Engine, Spark
from rossmann.files import whole_folder, write_whole
from rossmann.prepare import STEPS, Prepared, prepare
from rossmann.tables import CATEGORICAL, TABLES, BadInputError
from rossmann.train import Options, Trained, load, train

# Every rank imports PyTorch, which takes its time on a busy machine.
pytestmark = pytest.mark.timeout(600)

# Two stores: one with a competitor and a second promotion, one without dates. The year before the test days is held
# out; 2014-08-01 is a Friday in ISO week 31, 2015-08-01 a Saturday in the same week.
GOLDEN = {
    "train": """
        Store,DayOfWeek,Date,Sales,Customers,Open,Promo,StateHoliday,SchoolHoliday
        1,5,2015-07-31,700,70,1,1,0,0
        2,5,2015-07-31,300,30,1,0,0,1
        1,4,2015-07-30,0,0,0,0,a,0
        2,4,2015-07-30,250,25,1,0,0,0
        1,1,2015-07-27,500,50,1,1,0,0
        1,6,2014-08-02,400,40,1,0,0,0
        1,5,2014-08-01,600,60,1,1,0,1""",
    "test": """
        Id,Store,DayOfWeek,Date,Open,Promo,StateHoliday,SchoolHoliday
        3,1,7,2015-08-02,1,0,0,0
        2,1,6,2015-08-01,,0,0,1
        1,2,6,2015-08-01,1,1,0,0""",
    "store": """
        Store,StoreType,Assortment,CompetitionDistance,CompetitionOpenSinceMonth,CompetitionOpenSinceYear,Promo2,Promo2SinceWeek,Promo2SinceYear,PromoInterval
        1,c,a,1270,7,2014,1,27,2015,"Jan,Apr,Jul,Oct"
        2,a,a,NaN,,,0,,,""",
    "store_states": """
        Store,State
        1,"HB,NI"
        2,HE""",
    "state_names": """
        StateName,State
        Niedersachsen,"HB,NI"
        Hessen,HE""",
    "googletrend": """
        file,week,trend
        Rossmann_DE,2014-07-27 - 2014-08-02,59
        Rossmann_DE,2014-08-03 - 2014-08-09,60
        Rossmann_DE,2015-08-02 - 2015-08-08,70
        Rossmann_DE_NI,2014-08-03 - 2014-08-09,40
        Rossmann_DE_NI,2015-08-02 - 2015-08-08,50
        Rossmann_DE_HE,2015-08-02 - 2015-08-08,80""",
    "weather": "\n".join(
        [
            "file,Date,Max_TemperatureC,Mean_TemperatureC,Min_TemperatureC,Max_Humidity,Mean_Humidity,Min_Humidity,"
            "Max_Wind_SpeedKm_h,Mean_Wind_SpeedKm_h,CloudCover,Events",
            *(
                f"Niedersachsen,{day},20,15,10,90,70,50,24,11,,{event}"
                for day, event in {
                    "2014-08-01": "Rain",
                    "2014-08-02": "",
                    "2015-07-27": "Fog",
                    "2015-07-30": "",
                    "2015-07-31": "Rain",
                    "2015-08-01": "",
                    "2015-08-02": "",
                }.items()
            ),
            *(f"Hessen,{day},30,25,20,80,60,40,20,9,5," for day in ("2015-07-30", "2015-07-31", "2015-08-01")),
        ]
    ),
}


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """The tiny files."""
    folder = tmp_path / "golden"
    folder.mkdir()
    for table, text in GOLDEN.items():
        (folder / f"{table}.csv").write_text("\n".join(line.strip() for line in text.strip().splitlines()) + "\n")
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Six stores, prepared."""
    folder = tmp_path_factory.mktemp("small")
    generate.generate(folder / "data", stores=6, days=420, seed=3)
    return prepare(DataFusion(), folder / "data", folder / "features")


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    """One session for all tests, where it is installed."""
    if importlib.util.find_spec("pyspark") is None or shutil.which("java") is None:
        pytest.skip("pyspark or java is missing: pip install 'deuteron[spark]', and Java 17")
    from pyspark.sql import SparkSession

    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.sql.shuffle.partitions", "2")
    session = builder.config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse"))).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield Spark("local[2]")
    session.stop()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    """The one that the test is about."""
    engine: Engine = DataFusion() if request.param == "datafusion" else request.getfixturevalue("spark")
    return engine


on_both = pytest.mark.parametrize("engine", ["datafusion", "spark"], indirect=True)


def decoded(prepared: Prepared, part: str) -> list[dict[str, Any]]:
    """The rows of a data set with values in place of their numbers."""
    rows = pq.read_table(Path(prepared.folder) / part).to_pylist()
    for row in rows:
        row.update({column: prepared.vocabulary[column][row[column]] for column in CATEGORICAL})
    return rows


@on_both
def test_golden_values(engine: Engine, golden: Path, tmp_path: Path) -> None:
    """Every number here is computed by hand."""
    told: list[str] = []
    prepared = prepare(engine, golden, tmp_path / "features", told=told.append)
    assert told == STEPS
    assert prepared.rows == {"train": 5, "validation": 1, "test": 3}
    assert prepared.max_sales == 700
    assert prepared.vocabulary["State"] == ["HB,NI", "HE"]
    assert prepared.vocabulary["Events"] == ["", "Fog", "Rain"]
    assert prepared.vocabulary["PromoInterval"] == ["", "Jan,Apr,Jul,Oct"]
    assert prepared.vocabulary["CompetitionOpenSinceYear"] == [1900, 2014]
    assert prepared.vocabulary["Promo"] == [False, True]

    # One day, not two: the last day of the test, one year before, is outside.
    (held_out,) = decoded(prepared, "validation")
    assert str(held_out["Date"]) == "2014-08-01"
    expected = {
        "Sales": 600,
        "Store": 1,
        "Year": 2014,
        "Month": 8,
        "Week": 31,
        "Day": 1,
        "DayOfWeek": 5,
        # 17 days after the 15th of July 2014.
        "CompetitionMonthsOpen": 0,
        "Promo2Weeks": 0,
        "Promo": True,
        "SchoolHoliday": True,
        "StateHoliday": False,
        "Events": "Rain",
        "CloudCover": 0,
        "CompetitionDistance": 1270,
        # Sunday the 3rd is the last day of ISO week 31; Sunday the 27th that of week 30.
        "trend": 40,
        "trend_de": 60,
        "BeforePromo": 0,
        "AfterPromo": 0,
        "BeforeSchoolHoliday": 0,
        "AfterSchoolHoliday": 0,
        # The next is on 2015-07-30; none before, so the first day counts.
        "BeforeStateHoliday": -363,
        "AfterStateHoliday": 0,
    }
    assert {column: held_out[column] for column in expected} == expected

    train_rows = decoded(prepared, "train")
    assert [(str(row["Date"]), row["Store"]) for row in train_rows] == [
        ("2014-08-02", 1),
        ("2015-07-27", 1),
        ("2015-07-30", 2),
        ("2015-07-31", 1),
        ("2015-07-31", 2),
    ]
    by_day = {(str(row["Date"]), row["Store"]): row for row in train_rows}
    first, second = by_day["2015-07-31", 1], by_day["2015-07-31", 2]
    # 381 days after the 15th of July 2014; week 27 of 2015 counts from the 2nd of July (26 weeks later): 29 days.
    assert (first["CompetitionMonthsOpen"], first["Promo2Weeks"]) == (12, 4)
    assert (second["CompetitionMonthsOpen"], second["Promo2Weeks"]) == (0, 0)
    assert (second["CompetitionOpenSinceYear"], second["Promo2SinceYear"]) == (1900, 1900)
    assert (second["CompetitionDistance"], second["trend"], second["trend_de"], second["CloudCover"]) == (0, 80, 70, 5)
    # Store 1: state holiday on the 30th, school holiday a year ago and on the 1st, no promotion after the 31st.
    assert (first["AfterStateHoliday"], first["BeforeStateHoliday"]) == (1, -2)
    assert (first["AfterSchoolHoliday"], first["BeforeSchoolHoliday"]) == (364, -1)
    # Store 2 has its only promotion on the 1st of August, and its first day on the 30th of July.
    assert (second["AfterPromo"], second["BeforePromo"]) == (1, -1)

    test_rows = decoded(prepared, "test")
    assert [row["Id"] for row in test_rows] == [1, 2, 3]
    assert (test_rows[2]["BeforePromo"], test_rows[2]["AfterPromo"]) == (0, 2)
    assert test_rows[2]["AfterSchoolHoliday"] == 1


def test_a_category_that_a_model_has_not_seen_has_the_last_number(golden: Path, tmp_path: Path) -> None:
    words = prepare(DataFusion(), golden, tmp_path / "first").vocabulary
    prepare(DataFusion(), golden, tmp_path / "second", words | {"Events": ["", "Snow"]})
    events = pq.read_table(tmp_path / "second" / "train")["Events"].to_pylist()
    assert sorted(set(events)) == [0, 2]


def test_generated_data_has_the_real_shape_and_is_the_same_for_a_seed(tmp_path: Path) -> None:
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        generate.generate(tmp_path / folder, stores=5, days=400, seed=seed)
    for table in TABLES:
        first, again, other = ((tmp_path / folder / f"{table}.csv").read_bytes() for folder in "abc")
        assert first == again
        assert first != other or table == "state_names"
    assert len((tmp_path / "a" / "googletrend.csv").read_text().splitlines()) == 1 + 14 * 148
    assert len((tmp_path / "a" / "weather.csv").read_text().splitlines()) == 1 + 16 * 990


def test_rows_are_kept(small: Prepared) -> None:
    data = Path(small.folder).parent / "data"
    lines = [line.split(",") for line in (data / "train.csv").read_text().splitlines()[1:]]
    assert small.rows["train"] + small.rows["validation"] == sum(int(line[3]) > 0 for line in lines)
    assert small.rows["test"] == len((data / "test.csv").read_text().splitlines()) - 1


PARITY = {"epochs": 2, "dropout": 0.0, "layers": (64, 32), "warmup_epochs": 0}


def trained_on(ranks: int, prepared: Prepared, checkpoint: str | None = None, **more: Any) -> Trained:
    """Trains with the same batch and rate in all, on so many ranks."""
    options = Options(**PARITY | {"batch_size": 96 // ranks, "learning_rate": 2e-3 / ranks} | more)
    result: Trained = deuteron.run(train, args=(prepared, options, checkpoint), num_proc=ranks, timeout=300)[0]
    return result


@pytest.fixture(scope="module")
def trained(small: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """On two ranks."""
    path = tmp_path_factory.mktemp("trained") / "checkpoint.pt"
    trained = trained_on(2, small, str(path))
    assert path.read_bytes() == trained.checkpoint
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    return trained


def test_loss_curves_do_not_depend_on_the_number_of_ranks(small: Prepared, trained: Trained) -> None:
    curves = [trained.history, *(trained_on(ranks, small).history for ranks in (1, 4))]
    for epochs in zip(*curves, strict=True):
        for what in ("loss", "exp_rmspe", "val_loss", "val_exp_rmspe"):
            values = [getattr(epoch, what) for epoch in epochs]
            assert max(values) <= 1.01 * min(values), (what, values)


def check_submission(path: Path, prepared: Prepared) -> None:
    """Complete, sorted, and of numbers that can be sales."""
    header, *lines = path.read_text().splitlines()
    assert header == "Id,Sales"
    assert [int(line.split(",")[0]) for line in lines] == list(range(1, prepared.rows["test"] + 1))
    assert all(0 < float(line.split(",")[1]) < prepared.max_sales**1.2 for line in lines)


def test_prediction_is_complete_and_sorted(
    small: Prepared, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several batches for each process.
    monkeypatch.setattr(predict, "BATCH", 50)
    moved: list[int] = []
    scored = predict.here(Path(small.folder) / "test", trained.checkpoint, 2)
    rows = predict.write_submission(tmp_path / "submission.csv", scored, moved.append)
    assert rows == sum(moved) == small.rows["test"]
    assert len(moved) > 2
    check_submission(tmp_path / "submission.csv", small)
    assert [entry.name for entry in tmp_path.iterdir()] == ["submission.csv"]


def test_spark_predicts_the_same(spark: Spark, small: Prepared, trained: Trained, tmp_path: Path) -> None:
    import cloudpickle
    import rossmann

    cloudpickle.register_pickle_by_value(rossmann)
    try:
        folder = Path(small.folder) / "test"
        scored = predict.on_spark(spark.session, folder, trained.checkpoint, 2)
        predict.write_submission(tmp_path / "submission.csv", scored)
    finally:
        cloudpickle.unregister_pickle_by_value(rossmann)
    check_submission(tmp_path / "submission.csv", small)
    model = load(trained.checkpoint)
    expected = [predict.score(batch, model) for batch in pq.read_table(folder).to_batches()]
    predict.write_submission(tmp_path / "expected.csv", expected)
    found, wanted = (
        [float(line.split(",")[1]) for line in (tmp_path / name).read_text().splitlines()[1:]]
        for name in ("submission.csv", "expected.csv")
    )
    assert found == pytest.approx(wanted, rel=1e-4, abs=0.02)


def test_training_ends_at_what_is_not_a_number(small: Prepared) -> None:
    trained = trained_on(2, small, learning_rate=float("inf"))
    assert "not a number" in trained.ended
    assert not trained.checkpoint


def test_training_ends_when_nothing_improves(small: Prepared) -> None:
    """In this process, which is then the only rank."""
    options = Options(**PARITY | {"learning_rate": 0.0, "epochs": 5, "patience": 2})
    try:
        trained = train(small, options)
    finally:
        hvd.shutdown()
    assert trained is not None
    assert len(trained.history) == 3
    assert "nothing has improved for 2 epochs" in trained.ended
    assert trained.best == 1


def command(*words: str) -> list[str]:
    """The example's."""
    return [sys.executable, str(EXAMPLES / "rossmann"), *words]


def test_the_command_leaves_a_submission_pictures_and_a_summary(tmp_path: Path) -> None:
    # What a run that was killed has left.
    (tmp_path / "out" / ".features.999999999.partial").mkdir(parents=True)
    words = ["--size", "3", "--epochs", "1", "--out", str(tmp_path / "out")]
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("features", "checkpoint.pt", "submission.csv"),
        *("learning_curve.png", "learning_curve.svg", "predicted.png", "predicted.svg"),
    }
    for word in ("generate", "prepare", "train", "predict", "median of store, weekday, promo", "network, epoch 1"):
        assert word in done.stdout


def test_an_interrupted_command_ends_quietly_and_leaves_nothing_half(tmp_path: Path) -> None:
    words = ["--size", "3", "--epochs", "100000", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONUNBUFFERED": "1"}
    (tmp_path / "tmp").mkdir()
    run = subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, process_group=0
    )
    try:
        # In the middle of training.
        assert run.stdout is not None
        for line in run.stdout:
            if "epoch 1:" in line:
                break
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, errors
    assert "Traceback" not in errors
    assert not list((tmp_path / "tmp").glob("*.csv"))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"features", "checkpoint.pt"}


@pytest.mark.skipif(not os.environ.get("DEUTERON_LARGE"), reason="half an hour; DEUTERON_LARGE=1 runs it")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [10, 11, 12])
def test_the_demo_is_as_good_as_one_rank_and_better_than_the_median(seed: int, tmp_path: Path) -> None:
    errors = {}
    for ranks in (1, 2):
        words = ["--seed", str(seed), "--num-proc", str(ranks), "--out", str(tmp_path / "out")]
        done = subprocess.run(command(*words), capture_output=True, text=True, check=True)
        median, network = (float(found) for found in re.findall(r"(?:promo|network, epoch \d+) +(0\.\d+)", done.stdout))
        errors[ranks] = network
        print(f"seed {seed}, {ranks} ranks: median {median}, network {network}")
    assert errors[2] <= 1.1 * errors[1]
    assert errors[2] <= 0.7 * median


def test_the_command_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: it takes a while to import everything."""
    monkeypatch.setattr(sys, "argv", ["rossmann", "--data", str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=rf"^rossmann: {tmp_path} has no train\.csv, "):
        demo.main()
    assert not list(tmp_path.iterdir())


def test_the_command_refuses_numbers_that_make_no_sense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, least in (("--epochs", 1), ("--num-proc", 1), ("--batch-size", 1), ("--size", 2)):
        monkeypatch.setattr(sys, "argv", ["rossmann", name, str(least - 1)])
        with pytest.raises(SystemExit):
            demo.main()
        assert f"argument {name}: {least - 1}: it must be at least {least}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(sys, "argv", ["rossmann", "--size", "3", "--batch-size", "5000", "--num-proc", "2"])
    with pytest.raises(SystemExit, match=r"^rossmann: 2,\d{3} rows are less than one step of 10,000: give a smaller"):
        demo.main()


def without(path: Path, text: str, other: str) -> None:
    """Changes a file."""
    content = path.read_text()
    assert text in content
    path.write_text(content.replace(text, other, 1), errors="surrogateescape")


@pytest.mark.parametrize(
    ("table", "text", "other", "message"),
    [
        ("weather", None, None, r"has no weather\.csv: give the folder with the competition's files"),
        ("store", "CompetitionDistance", "Distance", r"store\.csv has no column CompetitionDistance: its first line"),
        ("train", "2015-07-27,500", "2015-07-27,many", r"train\.csv: 'many' in column Sales is not a whole number"),
        ("test", "2015-08-02", "02.08.2015", r"test\.csv: '02\.08\.2015' in column Date is not a date"),
        (
            "train",
            "2,4,2015-07-30,250,25",
            "2,4,2015-07-30,250",
            r"train\.csv cannot be read: line 5 has 8 fields, and the",
        ),
        ("state_names", "Hessen,HE", "Hessen,HE,3", r"state_names\.csv cannot be read: line 3 has 3 fields"),
        (
            "train",
            "2015-07-27",
            "\udcff\udcfe\udc80",
            r"train\.csv cannot be read: line 6 is not text in UTF-8: mend the",
        ),
        ("train", "1,1,2015-07-27", "1,5,2015-07-31", r"10 rows for 9 days of stores: each must be there once"),
        ("store_states", "2,HE", "3,HE", r"10 rows .* became 7 in the join with store\.csv and store_states\.csv"),
        ("weather", "Hessen,2015-07-30", "Bayern,2015-07-30", r"10 rows .* became 9 in the join with weather\.csv"),
        ("googletrend", "Rossmann_DE,2014-08-03", "Rossmann_DE_BY,2014-08-03", r"join with googletrend\.csv \(Ross"),
    ],
)
def test_bad_input_is_named(
    golden: Path, tmp_path: Path, table: str, text: str | None, other: str, message: str
) -> None:
    path = golden / f"{table}.csv"
    if text is None:
        path.unlink()
    else:
        without(path, text, other)
    with pytest.raises(BadInputError, match=message):
        prepare(DataFusion(), golden, tmp_path / "features")
    assert [entry.name for entry in tmp_path.iterdir()] == ["golden"]


@on_both
def test_a_line_with_too_few_fields_is_named(engine: Engine, golden: Path, tmp_path: Path) -> None:
    without(golden / "train.csv", "2,4,2015-07-30,250,25", "2,4,2015-07-30,250")
    with pytest.raises(
        BadInputError, match=r"train\.csv cannot be read: line 5 has 8 fields, and the first line names 9"
    ):
        prepare(engine, golden, tmp_path / "features")
    assert [entry.name for entry in tmp_path.iterdir()] == ["golden"]


def test_what_is_half_written_is_removed_and_what_was_there_stays(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "features") as partial:
        (partial / "file").write_text("first")
    with pytest.raises(OSError, match="no space"), whole_folder(tmp_path / "features") as partial:
        (partial / "file").write_text("sec")
        raise OSError("no space")
    assert [entry.name for entry in tmp_path.iterdir()] == ["features"]
    assert (tmp_path / "features" / "file").read_text() == "first"


def test_a_full_disk_leaves_nothing_half(small: Prepared, tmp_path: Path) -> None:
    """A limit on the size of files stands for it."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            prepare(DataFusion(), Path(small.folder).parent / "data", tmp_path / "features")
        with pytest.raises(OSError, match="File too large"):
            write_whole(tmp_path / "submission.csv", bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_has_left_is_removed_by_the_next_and_what_a_running_one_writes_is_not(tmp_path: Path) -> None:
    alive = tmp_path / ".features.1.partial"
    for left in (alive, tmp_path / ".features.999999999.partial", tmp_path / ".features.999999999-old.partial"):
        left.mkdir()
    (tmp_path / ".submission.csv.999999999.partial").write_text("Id,Sa")
    with whole_folder(tmp_path / "features") as partial:
        (partial / "file").write_text("whole")
    write_whole(tmp_path / "submission.csv", b"Id,Sales")
    assert {entry.name for entry in tmp_path.iterdir()} == {alive.name, "features", "submission.csv"}
