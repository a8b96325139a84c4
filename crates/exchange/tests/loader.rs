//! From real files to mini-batches: what is seen is what the plan says, whatever the format and the number of threads.
#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

use arrow_array::{
    ArrayRef, BooleanArray, Date32Array, FixedSizeListArray, Float32Array, Float64Array,
    Int32Array, Int64Array, LargeBinaryArray, RecordBatch, RecordBatchIterator, StringArray,
    TimestampMicrosecondArray, types::Float32Type,
};
use deuteron_exchange::{
    DType, Dataset, Fill, Filter, Group, Operator, Options, Request, Source, Tensor, Value, files,
    plan::{Order, Rest, Shuffle},
};
use parquet::{arrow::ArrowWriter, file::properties::WriterProperties};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// A folder that ends with its test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("exchange-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn parquet(&self, name: &str, batch: &RecordBatch, group: usize) -> PathBuf {
        let path = self.0.join(name);
        let properties =
            WriterProperties::builder().set_max_row_group_row_count(Some(group)).build();
        let mut writer =
            ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), Some(properties))
                .unwrap();
        writer.write(batch).unwrap();
        writer.close().unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn options(shuffle: Shuffle) -> Options {
    Options {
        order: Order { ranks: 1, batch: 4, shuffle, rest: Rest::Drop, seed: 3 },
        prefetch: 2,
        threads: Some(3),
        memory: 1000,
        ..Options::new(4, 0, 1)
    }
}

fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable(
        columns.into_iter().map(|(name, array)| (name, array, true)),
    )
    .unwrap()
}

fn numbered(rows: std::ops::Range<i64>) -> RecordBatch {
    let half = Float32Array::from_iter_values(rows.clone().map(|row| row as f32 / 2.0));
    batch(vec![("half", Arc::new(half)), ("id", Arc::new(Int64Array::from_iter_values(rows)))])
}

fn stream(batch: RecordBatch) -> Source {
    let schema = batch.schema();
    Source::Stream(Box::new(RecordBatchIterator::new([Ok(batch)], schema)))
}

fn longs(tensor: &Tensor) -> Vec<i64> {
    assert_eq!(tensor.dtype, DType::I64);
    tensor.bytes().as_chunks().0.iter().map(|&value| i64::from_ne_bytes(value)).collect()
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    assert_eq!(tensor.dtype, DType::F32);
    tensor.bytes().as_chunks().0.iter().map(|&value| f32::from_ne_bytes(value)).collect()
}

fn error(source: Source, options: Options) -> String {
    let dataset = match Dataset::open(source, options) {
        Ok(dataset) => dataset,
        Err(error) => return error.to_string(),
    };
    let failed = dataset.epoch(0, 0).unwrap().find_map(Result::err);
    failed.map(|error| error.to_string()).unwrap_or_default()
}

fn paths(of: &[&Path]) -> Source {
    Source::Files(files(&of.iter().map(|path| path.to_path_buf()).collect::<Vec<_>>()).unwrap())
}

#[test]
fn what_is_seen_is_what_the_plan_says() {
    let folder = Folder::new();
    folder.parquet("a.parquet", &numbered(0..50), 20);
    folder.parquet("b.parquet", &numbered(50..107), 30);
    fs::write(folder.0.join("_SUCCESS"), "").unwrap();
    for shuffle in [Shuffle::None, Shuffle::Buffer(10), Shuffle::Buffer(1000), Shuffle::Full] {
        for (ranks, rest) in [(1, Rest::Drop), (3, Rest::Pad), (13, Rest::Pad), (40, Rest::Pad)] {
            for (rank, step) in [(0, 0), (ranks - 1, 0), (ranks / 2, 1), (0, 3)] {
                let order = Order { ranks, batch: 4, shuffle, rest, seed: 3 };
                let dataset =
                    Dataset::open(paths(&[&folder.0]), Options { order, rank, ..options(shuffle) })
                        .unwrap();
                assert_eq!(dataset.plan().rows(), 107);
                let share = dataset.plan().share(rank, 5).unwrap();
                let expected: Vec<i64> =
                    (step * 4..share.count()).map(|position| share.row(position) as i64).collect();
                let mut seen = Vec::new();
                for batch in dataset.epoch(5, step).unwrap() {
                    let tensors: Vec<Tensor> = batch.unwrap().into_tensors().collect();
                    let ids = longs(&tensors[1]);
                    assert_eq!(ids.len(), 4);
                    assert!(
                        floats(&tensors[0])
                            .iter()
                            .zip(&ids)
                            .all(|(half, &id)| *half == id as f32 / 2.0)
                    );
                    seen.extend(ids);
                }
                assert_eq!(seen, expected, "{order:?}, rank {rank} from step {step}");
            }
        }
    }
}

#[test]
fn threads_share_row_groups() {
    let folder = Folder::new();
    // Three row groups, and neither they nor windows end where parts do.
    folder.parquet("a.parquet", &numbered(0..200_000), 90_000);
    let all = Filter {
        column: "id".into(),
        operator: Operator::GreaterEqual,
        values: vec![Value::Int(0)],
    };
    for shuffle in [Shuffle::None, Shuffle::Buffer(30_000), Shuffle::Full] {
        for filters in [vec![], vec![all.clone()]] {
            for (rank, step, memory) in [(0, 0, 0), (1, 0, 1 << 30), (1, 47, 1 << 30)] {
                let order = Order { ranks: 2, batch: 1000, shuffle, rest: Rest::Drop, seed: 1 };
                let filters = filters.clone();
                let options = Options { order, rank, filters, memory, ..options(shuffle) };
                let dataset = Dataset::open(paths(&[&folder.0]), options).unwrap();
                let share = dataset.plan().share(rank, 1).unwrap();
                let expected = (step * 1000..share.count()).map(|position| share.row(position));
                let seen = dataset.epoch(1, step).unwrap().flat_map(|batch| {
                    let tensors: Vec<Tensor> = batch.unwrap().into_tensors().collect();
                    let ids = longs(&tensors[1]);
                    let halves = floats(&tensors[0]);
                    assert!(halves.iter().zip(&ids).all(|(half, &id)| *half == id as f32 / 2.0));
                    ids
                });
                assert!(seen.eq(expected.map(|row| row as i64)), "{order:?}, rank {rank}");
            }
        }
    }
}

#[test]
fn groups_are_matrices() {
    let names = StringArray::from(vec!["z", "y", "z", "x"]);
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("a", Arc::new(Int64Array::from(vec![1, 2, 3, 4]))),
        ("y", Arc::new(Float32Array::from(vec![0.5, 1.5, 2.5, 3.5]))),
        ("text", Arc::new(names)),
        ("b", Arc::new(Int64Array::from(vec![10, 20, 30, 40]))),
    ];
    let group = |name: &str, columns: &[&str]| Group {
        name: name.into(),
        columns: columns.iter().map(|&column| column.to_owned()).collect(),
    };
    let groups = vec![group("x", &["b", "text", "a"])];
    let rows = batch(columns);
    let dataset =
        Dataset::open(stream(rows.clone()), Options { groups, ..options(Shuffle::None) }).unwrap();
    let names: Vec<&str> = dataset.layout().fields().iter().map(|field| field.name()).collect();
    assert_eq!(names, ["x", "y"]);
    let made = dataset.epoch(0, 0).unwrap().next().unwrap().unwrap();
    let tensors: Vec<Tensor> = made.into_tensors().collect();
    assert_eq!(tensors[0].shape, [4, 3]);
    assert_eq!(longs(&tensors[0]), [10, 2, 1, 20, 1, 2, 30, 2, 3, 40, 0, 4]);
    assert_eq!(floats(&tensors[1]), [0.5, 1.5, 2.5, 3.5]);
    for (groups, message) in [
        (vec![group("y", &["a"])], "there are two tensors \"y\": name the group otherwise"),
        (
            vec![group("x", &["a", "y"])],
            "group \"x\": column \"y\" is float32, and \"a\" is int64: name",
        ),
        (vec![group("x", &["a"]), group("z", &["a"])], "group \"x\": column \"a\" can be in one"),
        (vec![group("x", &["c"])], "group \"x\": there is no column \"c\" among those"),
        (vec![group("x", &[])], "group \"x\": it has no columns"),
    ] {
        let found = error(stream(rows.clone()), Options { groups, ..options(Shuffle::None) });
        assert!(found.starts_with(message), "{found}");
    }
}

#[test]
fn filters_leave_out_rows_and_row_groups() {
    let folder = Folder::new();
    let path = folder.parquet("a.parquet", &numbered(0..1000), 100);
    // What cannot be read shows what was read: the second half is broken, and nobody wants it.
    let mut bytes = fs::read(&path).unwrap();
    let (middle, end) = (bytes.len() / 2, bytes.len() * 3 / 5);
    bytes[middle..end].fill(0xff);
    fs::write(&path, bytes).unwrap();
    for shuffle in [Shuffle::None, Shuffle::Full] {
        let filter =
            |operator, value| Filter { column: "id".into(), operator, values: vec![value] };
        let filters = vec![
            filter(Operator::GreaterEqual, Value::Int(150)),
            filter(Operator::Less, Value::Float(250.5)),
        ];
        let dataset =
            Dataset::open(paths(&[&path]), Options { filters, ..options(shuffle) }).unwrap();
        assert_eq!(dataset.plan().rows(), 101);
        let mut seen: Vec<i64> = dataset
            .epoch(0, 0)
            .unwrap()
            .flat_map(|batch| longs(&batch.unwrap().into_tensors().nth(1).unwrap()))
            .collect();
        seen.sort_unstable();
        assert_eq!(seen.len(), 100);
        assert!(seen.iter().all(|id| (150..=250).contains(id)));
    }
}

#[test]
fn every_type_becomes_a_tensor() {
    let text = StringArray::from(vec![Some("b"), Some("a"), None, Some("b")]);
    let list = vec![
        Some(vec![Some(1.0), Some(2.0)]),
        Some(vec![None, Some(3.0)]),
        None,
        Some(vec![Some(4.0), Some(5.0)]),
    ];
    let bytes = [1.5_f32, 2.5].map(f32::to_ne_bytes).concat();
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("truth", Arc::new(BooleanArray::from(vec![Some(true), Some(false), None, Some(true)]))),
        ("day", Arc::new(Date32Array::from(vec![0, -1, 2, 3]))),
        ("time", Arc::new(TimestampMicrosecondArray::from(vec![7, 8, 9, 10]))),
        ("text", Arc::new(text)),
        ("list", Arc::new(FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(list, 2))),
        ("tensor", Arc::new(LargeBinaryArray::from_iter_values(std::iter::repeat_n(bytes, 4)))),
        ("narrow", Arc::new(Float64Array::from(vec![0.5, 1.5, 2.5, 3.5]))),
    ];
    let request = |name: &str| Request { name: name.into(), ..Request::default() };
    let requests = vec![
        Request { fill: Some(Fill::Int(0)), ..request("truth") },
        Request { fill: Some(Fill::Text("c".into())), ..request("text") },
        Request { fill: Some(Fill::Float(-1.0)), ..request("list") },
        Request { tensor: Some((DType::F32, vec![2, 1])), ..request("tensor") },
        Request { dtype: Some(DType::F32), ..request("narrow") },
    ];
    let dataset =
        Dataset::open(stream(batch(columns)), Options { requests, ..options(Shuffle::None) })
            .unwrap();
    let about = dataset.layout().columns();
    assert_eq!(about[1].unit(), Some("day"));
    assert_eq!(about[2].unit(), Some("us"));
    assert_eq!(about[3].categories().unwrap(), ["a", "b", "c"]);
    let batch = dataset.epoch(0, 0).unwrap().next().unwrap().unwrap();
    let tensors: Vec<Tensor> = batch.into_tensors().collect();
    assert_eq!(tensors[0].bytes(), [1, 0, 0, 1]);
    assert_eq!(longs(&tensors[1]), [0, -1, 2, 3]);
    assert_eq!(longs(&tensors[2]), [7, 8, 9, 10]);
    assert_eq!(longs(&tensors[3]), [1, 0, 2, 1]);
    assert_eq!(floats(&tensors[4]), [1.0, 2.0, -1.0, 3.0, -1.0, -1.0, 4.0, 5.0]);
    assert_eq!(tensors[4].shape, [4, 2]);
    assert_eq!(tensors[5].shape, [4, 2, 1]);
    assert_eq!(floats(&tensors[5])[..4], [1.5, 2.5, 1.5, 2.5]);
    assert_eq!(floats(&tensors[6]), [0.5, 1.5, 2.5, 3.5]);
}

#[test]
fn categories_have_the_same_numbers_on_every_rank() {
    let folder = Folder::new();
    let names = |names: &[&str]| {
        batch(vec![("text", Arc::new(StringArray::from(names.to_vec())) as ArrayRef)])
    };
    folder.parquet("a.parquet", &names(&["z", "y", "z", "y", "z"]), 2);
    folder.parquet("b.parquet", &names(&["x", "a", "x"]), 2);
    for shuffle in [Shuffle::None, Shuffle::Buffer(4), Shuffle::Full] {
        for rank in 0..2 {
            let order = Order { ranks: 2, ..options(shuffle).order };
            let dataset =
                Dataset::open(paths(&[&folder.0]), Options { order, rank, ..options(shuffle) })
                    .unwrap();
            assert_eq!(dataset.layout().columns()[0].categories().unwrap(), ["a", "x", "y", "z"]);
            let batch = dataset.epoch(0, 0).unwrap().next().unwrap().unwrap();
            if shuffle == Shuffle::None {
                let expected = [[3, 2, 3, 2], [3, 1, 0, 1]][rank as usize];
                assert_eq!(longs(&batch.into_tensors().next().unwrap()), expected);
            }
        }
    }
    let requests = vec![Request {
        name: "text".into(),
        categories: Some(vec!["z".into(), "y".into()]),
        ..Request::default()
    }];
    let message = error(paths(&[&folder.0]), Options { requests, ..options(Shuffle::Full) });
    assert!(
        message
            .contains("b.parquet, row group 0, column \"text\": \"x\" is not among its categories"),
        "{message}"
    );
}

#[test]
fn what_is_wrong_with_data_is_said_with_its_place() {
    let folder = Folder::new();
    let null: ArrayRef = Arc::new(Int32Array::from(vec![Some(1), None, Some(3), Some(4)]));
    let nulls = folder.parquet("nulls.parquet", &batch(vec![("x", null)]), 10);
    for shuffle in [Shuffle::None, Shuffle::Full] {
        let message = error(paths(&[&nulls]), options(shuffle));
        assert!(
            message.contains("nulls.parquet, row group 0, column \"x\": row 1 is null: name what"),
            "{message}"
        );
    }
    let nan: ArrayRef = Arc::new(Float64Array::from(vec![1.0, f64::NAN, 3.0, 4.0]));
    let nan = batch(vec![("x", nan)]);
    assert_eq!(error(stream(nan.clone()), options(Shuffle::Full)), "");
    let message = error(stream(nan), Options { refuse_nan: true, ..options(Shuffle::Full) });
    assert!(message.starts_with("column \"x\": row 1 is NaN"), "{message}");

    let whole = folder.parquet("whole.parquet", &numbered(0..1000), 100);
    let bytes = fs::read(&whole).unwrap();
    let cut = folder.0.join("cut.parquet");
    for length in [0, 3, 100, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&cut, &bytes[..length]).unwrap();
        let message = error(paths(&[&cut]), options(Shuffle::None));
        assert!(message.contains("cut.parquet: not a whole Parquet file"), "{length}: {message}");
    }
    let other: ArrayRef = Arc::new(Int32Array::from(vec![1]));
    let other = folder.parquet(
        "other.parquet",
        &batch(vec![("half", Arc::clone(&other)), ("id", other)]),
        10,
    );
    let message = error(paths(&[&whole, &other]), options(Shuffle::None));
    assert!(
        message
            .contains("other.parquet, column \"half\": it is Int32, and Float32 in the first file"),
        "{message}"
    );

    let columns = Some(vec!["sales".to_owned()]);
    let message = error(paths(&[&whole]), Options { columns, ..options(Shuffle::None) });
    assert_eq!(message, "there is no column \"sales\": there are half, id");
    let hive = folder.0.join("hive");
    fs::create_dir_all(hive.join("year=2024")).unwrap();
    let message = files(&[hive]).unwrap_err().to_string();
    assert!(
        message.contains("year=2024: columns in the names of folders are not read"),
        "{message}"
    );
    let message = files(&[folder.0.join("none.parquet")]).unwrap_err().to_string();
    assert!(message.ends_with("none.parquet: there is no such file or folder"), "{message}");
    let message = error(stream(numbered(0..0)), options(Shuffle::Full));
    assert!(message.starts_with("there are no rows"), "{message}");
}

#[test]
fn csv_and_arrow_files_are_read() {
    let folder = Folder::new();
    let csv = folder.0.join("a.csv");
    fs::write(
        &csv,
        "id,half,day\n0,0.0,1970-01-01\n1,0.5,1970-01-02\n2,1.0,1970-01-03\n3,1.5,1970-01-04\n",
    )
    .unwrap();
    let arrow = folder.0.join("a.arrow");
    let mut writer = arrow_ipc::writer::FileWriter::try_new(
        File::create(&arrow).unwrap(),
        &numbered(0..4).schema(),
    )
    .unwrap();
    writer.write(&numbered(0..4)).unwrap();
    writer.finish().unwrap();
    for path in [&csv, &arrow] {
        let columns = Some(vec!["id".to_owned(), "half".to_owned()]);
        let dataset =
            Dataset::open(paths(&[path]), Options { columns, ..options(Shuffle::None) }).unwrap();
        let batch = dataset.epoch(0, 0).unwrap().next().unwrap().unwrap();
        assert_eq!(longs(&batch.into_tensors().next().unwrap()), [0, 1, 2, 3]);
    }
    fs::write(&csv, "id\n1\n2\nthree\n").unwrap();
    let message = error(
        paths(&[&csv]),
        Options { columns: Some(vec!["id".into()]), ..options(Shuffle::None) },
    );
    assert!(message.contains("do not fill one step"), "text is categories: {message}");
    fs::write(&csv, "").unwrap();
    let message = error(paths(&[&csv]), options(Shuffle::None));
    assert!(message.contains("a.csv: the file is empty"), "{message}");
    fs::write(&arrow, "nothing").unwrap();
    let message = error(paths(&[&arrow]), options(Shuffle::None));
    assert!(message.contains("a.arrow: not a whole Arrow file"), "{message}");
}
