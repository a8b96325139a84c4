//! Where rows come from: streams of record batches, and files.
//!
//! - SO-1: a file's name is part of every error about it.
//! - SO-2: only the columns that are wanted are read, and no row group whose statistics say that none of its rows passes.

use crate::{
    Error, Filter, Layout, Result,
    deal::{Dealt, Work, deal},
    filter,
    pages::{Fit, Pages, Place},
    plan::Range,
};
use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, Schema, SchemaRef};
use parquet::arrow::{
    ProjectionMask,
    arrow_reader::{
        ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder,
        statistics::StatisticsConverter,
    },
};
use std::{
    fs::{self, File},
    io::{BufReader, Seek},
    path::{Path, PathBuf},
    sync::Arc,
};

/// Rows of a CSV file that decide on the types of its columns.
const LOOKED_AT: usize = 10_000;

/// Where rows come from.
pub enum Source {
    /// Files of one format, as [`files`] finds them.
    Files(Vec<PathBuf>),
    /// A stream, which is read once.
    Stream(Box<dyn RecordBatchReader + Send>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Parquet,
    Ipc,
    Csv,
}

impl Format {
    fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "parquet" | "pq" | "parq" => Some(Self::Parquet),
            "arrow" | "arrows" | "feather" | "ipc" => Some(Self::Ipc),
            "csv" => Some(Self::Csv),
            _ => None,
        }
    }

    /// The format that all have.
    pub(crate) fn of_all(paths: &[PathBuf]) -> Result<Self> {
        let mut found: Option<(Self, &Path)> = None;
        for path in paths {
            let Some(format) = Self::of(path) else {
                let what = "its name does not tell its format: .parquet, .arrow and .csv do";
                return Err(Error::data(path.display().to_string(), what));
            };
            match found {
                Some((first, other)) if first != format => {
                    let what = format!(
                        "it has another format than {}: load them one after the other",
                        other.display()
                    );
                    return Err(Error::data(path.display().to_string(), what));
                }
                _ => found = Some((format, path)),
            }
        }
        found.map(|(format, _)| format).ok_or_else(|| Error::Invalid("there are no files".into()))
    }
}

/// The files that these paths name, and those in folders, sorted; names with a dot or underscore in front are no data.
/// Folders in a folder whose names are values of a column, such as `year=2024`, are an error.
pub fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for path in paths {
        let about = fs::metadata(path).map_err(|error| Error::open(path, error))?;
        if !about.is_dir() {
            found.push(path.clone());
            continue;
        }
        let before = found.len();
        look_into(path, &mut found)?;
        if found.len() == before {
            return Err(Error::data(
                path.display().to_string(),
                "the folder has no Parquet, Arrow or CSV file",
            ));
        }
    }
    Ok(found)
}

fn look_into(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    let failed = |error| Error::open(folder, error);
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        entries.push(entry.map_err(failed)?.path());
    }
    entries.sort();
    for path in entries {
        let hidden = path.file_name().is_some_and(|name| {
            name.as_encoded_bytes().starts_with(b"_") || name.as_encoded_bytes().starts_with(b".")
        });
        if hidden {
            continue;
        }
        if path.is_dir() {
            // Such a folder's name is a value of a column that its files do not have.
            if path.file_name().is_some_and(|name| name.as_encoded_bytes().contains(&b'=')) {
                let what = "columns in the names of folders are not read: name such folders themselves to do without \
                            the column, or give a stream, such as pyarrow.dataset.dataset(folder, \
                            partitioning=\"hive\").scanner().to_reader()";
                return Err(Error::data(path.display().to_string(), what));
            }
            look_into(&path, found)?;
        } else if Format::of(&path).is_some() {
            found.push(path);
        }
    }
    Ok(())
}

/// The same columns with the same types as in the first file.
fn agree(first: &Schema, other: &Schema, columns: &[String], file: &str) -> Result<()> {
    for name in columns {
        let Ok(expected) = first.field_with_name(name) else { continue };
        let place = || format!("{file}, column {name:?}");
        let Ok(field) = other.field_with_name(name) else {
            return Err(Error::data(place(), "it is missing, and the first file has it"));
        };
        if field.data_type() != expected.data_type() {
            let what = format!(
                "it is {}, and {} in the first file",
                field.data_type(),
                expected.data_type()
            );
            return Err(Error::data(place(), format!("{what}: write them with one schema")));
        }
    }
    Ok(())
}

struct ParquetFile {
    path: PathBuf,
    name: String,
    metadata: ArrowReaderMetadata,
}

#[derive(Clone, Copy)]
struct Unit {
    file: usize,
    group: usize,
    /// After filters.
    rows: u64,
}

/// Parquet files: their row groups are units that can be read in any order.
#[derive(Clone)]
pub(crate) struct Parquet {
    files: Arc<Vec<ParquetFile>>,
    units: Vec<Unit>,
    filters: Vec<Filter>,
}

/// Where packed rows go.
pub(crate) trait Target {
    /// Room for at least one row, and for no more than so many.
    fn room(&mut self, rows: usize) -> Result<&mut [u8]>;

    /// So many rows of it were filled in. Whether more are wanted.
    fn filled(&mut self, rows: usize) -> Result<bool>;
}

/// What is read at a time.
pub(crate) type Each<'a> = &'a mut dyn FnMut(RecordBatch, u64) -> Result<bool>;

impl Parquet {
    pub(crate) fn open(paths: Vec<PathBuf>) -> Result<Self> {
        let mut files = Vec::with_capacity(paths.len());
        for path in paths {
            let name = path.display().to_string();
            let file = File::open(&path).map_err(|error| Error::open(&path, error))?;
            let loaded = ArrowReaderMetadata::load(&file, ArrowReaderOptions::new());
            let metadata = loaded.map_err(|error| Error::parquet(&name, &error))?;
            files.push(ParquetFile { path, name, metadata });
        }
        let mut units = Vec::new();
        for (file, parquet) in files.iter().enumerate() {
            let groups = parquet.metadata.metadata().row_groups().iter().enumerate();
            units.extend(groups.map(|(group, about)| Unit {
                file,
                group,
                rows: about.num_rows().max(0) as u64,
            }));
        }
        Ok(Self { files: Arc::new(files), units, filters: Vec::new() })
    }

    pub(crate) fn schema(&self) -> Result<SchemaRef> {
        let none = || Error::Invalid("there are no files".into());
        self.files.first().map(|file| Arc::clone(file.metadata.schema())).ok_or_else(none)
    }

    /// Every file has these columns, with the same types.
    pub(crate) fn check(&self, columns: &[String]) -> Result<()> {
        let schema = self.schema()?;
        self.files
            .iter()
            .try_for_each(|file| agree(&schema, file.metadata.schema(), columns, &file.name))
    }

    /// Rows of each unit.
    pub(crate) fn sizes(&self) -> Vec<u64> {
        self.units.iter().map(|unit| unit.rows).collect()
    }

    pub(crate) fn is_filtered(&self) -> bool {
        !self.filters.is_empty()
    }

    /// All rows in their order, in ranges of at most `most`, so that several threads can read one row group. Which rows
    /// pass filters is not known before they are read, so that with some a unit is one range.
    pub(crate) fn ranges(&self, most: u64) -> Vec<Range> {
        let cut = |(unit, rows): (usize, u64)| {
            let step = if self.is_filtered() { rows.max(1) } else { most.max(1) };
            let starts = (0..rows).step_by(step as usize);
            starts.map(move |start| Range { unit, start, rows: step.min(rows - start) })
        };
        self.sizes().into_iter().enumerate().flat_map(cut).collect()
    }

    /// Leaves out units that cannot have a row that passes, and counts the rows of the others that do.
    pub(crate) fn filter(mut self, filters: Vec<Filter>, threads: usize) -> Result<Self> {
        if filters.is_empty() {
            return Ok(self);
        }
        let mut possible: Vec<Vec<bool>> = Vec::with_capacity(self.files.len());
        for file in self.files.iter() {
            let groups = file.metadata.metadata().row_groups();
            let mut keep = vec![true; groups.len()];
            for filter in &filters {
                let schema = file.metadata.schema();
                let failed = |error| Error::parquet(&file.name, &error);
                // Not every type has statistics, and without them everything is possible.
                let Ok(statistics) = StatisticsConverter::try_new(
                    &filter.column,
                    schema,
                    file.metadata.parquet_schema(),
                ) else {
                    continue;
                };
                let least = statistics.row_group_mins(groups).map_err(failed)?;
                let most = statistics.row_group_maxes(groups).map_err(failed)?;
                let possible = filter.possible(&least, &most)?;
                keep.iter_mut().zip(possible).for_each(|(keep, possible)| *keep &= possible);
            }
            possible.push(keep);
        }
        self.units.retain(|unit| possible[unit.file][unit.group]);
        self.filters = filters;
        let counted = self.count(threads)?;
        self.units.iter_mut().zip(counted).for_each(|(unit, rows)| unit.rows = rows);
        self.units.retain(|unit| unit.rows > 0);
        Ok(self)
    }

    fn count(&self, threads: usize) -> Result<Vec<u64>> {
        let columns: Vec<String> =
            self.filters.iter().map(|filter| filter.column.clone()).collect();
        let mut counts = Arc::new(self.clone()).over_units(threads, move |parquet, unit| {
            let mut rows = 0;
            parquet.read(unit, &columns, None, 8192, &mut |batch, _| {
                rows += batch.num_rows() as u64;
                Ok(true)
            })?;
            Ok(rows)
        })?;
        std::iter::from_fn(|| counts.next()).collect()
    }

    /// What is made of each unit, in their order, by so many threads.
    pub(crate) fn over_units<T: Send + 'static>(
        self: &Arc<Self>,
        threads: usize,
        work: impl Fn(&Self, usize) -> Result<T> + Clone + Send + 'static,
    ) -> Result<Dealt<T>> {
        let units = self.units.len() as u64;
        let threads = threads.min(units as usize).max(1);
        let one = |_| -> Work<T> {
            let (parquet, work) = (Arc::clone(self), work.clone());
            Box::new(move |unit, sink| Ok(sink.put(work(&parquet, unit as usize)?, true)))
        };
        deal("unit", units, 2, (0..threads).map(one).collect())
    }

    /// Reads rows and packs them, `most` at a time. Whether more are wanted.
    pub(crate) fn pack(
        &self,
        range: Range,
        layout: &Layout,
        columns: &[String],
        most: usize,
        target: &mut dyn Target,
    ) -> Result<bool> {
        let mut rest = range;
        if let Some(mut pages) = self.pages(range, layout)? {
            while rest.rows > 0 {
                let room = target.room(most.min(rest.rows as usize))?;
                let rows = room.len() / layout.width();
                let failed = |error| self.broken(range.unit, &error);
                if pages.fill(room).map_err(failed)? == Fit::Unfit {
                    break;
                }
                (rest.start, rest.rows) = (rest.start + rows as u64, rest.rows - rows as u64);
                if !target.filled(rows)? {
                    return Ok(false);
                }
            }
        }
        let mut wanted = true;
        if rest.rows > 0 {
            self.read(rest.unit, columns, Some(rest), most, &mut |batch, first| {
                let mut taken = 0;
                while taken < batch.num_rows() && wanted {
                    let room = target.room(batch.num_rows() - taken)?;
                    let rows = room.len() / layout.width();
                    layout.pack(&batch.slice(taken, rows), first + taken as u64, room)?;
                    wanted = target.filled(rows)?;
                    taken += rows;
                }
                rest.rows -= taken as u64;
                Ok(wanted)
            })?;
        }
        match !wanted || rest.rows == 0 {
            true => Ok(wanted),
            false => Err(Error::Internal("there are fewer rows than were counted")),
        }
    }

    /// The pages of a range, if all its columns can go straight from them into rows.
    fn pages(&self, range: Range, layout: &Layout) -> Result<Option<Pages>> {
        let unit = self.units.get(range.unit).ok_or(Error::Internal("there is no such unit"))?;
        let file = &self.files[unit.file];
        let stored = layout.stored(file.metadata.schema()).filter(|_| !self.is_filtered());
        let Some(stored) = stored.filter(|_| layout.width() > 0) else { return Ok(None) };
        let leaves = file.metadata.parquet_schema().columns();
        let mut places = Vec::with_capacity(stored.len());
        for (name, place) in stored {
            let Some(leaf) = leaves.iter().position(|leaf| leaf.path().parts() == [name]) else {
                return Ok(None);
            };
            places.push(Place { leaf, offset: place.start, bytes: place.len() });
        }
        let opened = File::open(&file.path).map_err(|error| Error::open(&file.path, error))?;
        let group = file.metadata.metadata().row_group(unit.group);
        Pages::open(opened, group, &places, layout.width(), range.start as usize)
            .map_err(|error| self.broken(range.unit, &error))
    }

    /// What cannot be read of a unit.
    fn broken(&self, unit: usize, error: &dyn std::fmt::Display) -> Error {
        let place = self
            .units
            .get(unit)
            .map(|unit| format!("{}, row group {}", self.files[unit.file].name, unit.group));
        let what = format!("it cannot be read ({error}): write the file again");
        Error::data(place.unwrap_or_default(), what)
    }

    /// Reads rows of a unit, or all, in parts of at most `most`, until `each` has enough. `each` gets the number of the
    /// first row within what passes of the unit, too.
    pub(crate) fn read(
        &self,
        unit: usize,
        columns: &[String],
        rows: Option<Range>,
        most: usize,
        each: Each<'_>,
    ) -> Result<()> {
        let failed = |error: &dyn std::fmt::Display| self.broken(unit, error);
        let unit = self.units.get(unit).ok_or(Error::Internal("there is no such unit"))?;
        let file = &self.files[unit.file];
        let opened = File::open(&file.path).map_err(|error| Error::open(&file.path, error))?;
        let mut builder =
            ParquetRecordBatchReaderBuilder::new_with_metadata(opened, file.metadata.clone());
        let schema = file.metadata.schema();
        let wanted = columns.iter().chain(self.filters.iter().map(|filter| &filter.column));
        let roots = wanted.filter_map(|name| schema.index_of(name).ok()).collect::<Vec<_>>();
        let mask = ProjectionMask::roots(file.metadata.parquet_schema(), roots);
        builder =
            builder.with_row_groups(vec![unit.group]).with_projection(mask).with_batch_size(most);
        // Which rows pass is not known before they are read.
        let direct = rows.filter(|_| self.filters.is_empty());
        if let Some(range) = direct {
            builder = builder.with_offset(range.start as usize).with_limit(range.rows as usize);
        }
        let reader = builder.build().map_err(|error| failed(&error))?;
        let (mut skip, mut left) = match (direct, rows) {
            (None, Some(range)) => (range.start, range.rows),
            _ => (0, u64::MAX),
        };
        let mut first = direct.map_or(0, |range| range.start);
        for batch in reader {
            let batch = batch.map_err(|error| failed(&error))?;
            let batch =
                filter::apply(&self.filters, batch).map_err(|error| error.of(&file.name))?;
            let count = batch.num_rows() as u64;
            let skipped = skip.min(count);
            skip -= skipped;
            let taken = left.min(count - skipped);
            left -= taken;
            if taken > 0 {
                let part = batch.slice(skipped as usize, taken as usize);
                if !each(part, first + skipped).map_err(|error| {
                    error.of(&format!("{}, row group {}", file.name, unit.group))
                })? {
                    return Ok(());
                }
            }
            first += count;
            if left == 0 {
                break;
            }
        }
        Ok(())
    }
}

/// Files that are read from front to back.
pub(crate) struct Sequence {
    paths: Vec<PathBuf>,
    format: Format,
    schema: SchemaRef,
}

/// Batches that come one after the other.
type Sequential = Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>>>;

impl Sequence {
    pub(crate) fn open(paths: Vec<PathBuf>, format: Format) -> Result<Self> {
        let first = paths.first().ok_or_else(|| Error::Invalid("there are no files".into()))?;
        let schema = schema_of(first, format)?;
        Ok(Self { paths, format, schema })
    }

    pub(crate) fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    pub(crate) fn read(&self, columns: &[String], most: usize, each: Each<'_>) -> Result<()> {
        for path in &self.paths {
            let name = path.display().to_string();
            let (schema, batches) = self.batches(path, &name, columns, most)?;
            agree(&self.schema, &schema, columns, &name)?;
            let mut first = 0;
            for batch in batches {
                let batch = batch.map_err(|error| Error::arrow(&name, &error))?;
                let rows = batch.num_rows() as u64;
                if !each(batch, first).map_err(|error| error.of(&name))? {
                    return Ok(());
                }
                first += rows;
            }
        }
        Ok(())
    }

    fn batches(
        &self,
        path: &Path,
        name: &str,
        columns: &[String],
        most: usize,
    ) -> Result<(SchemaRef, Sequential)> {
        let failed = |error: ArrowError| Error::arrow(name, &error);
        let file =
            || File::open(path).map(BufReader::new).map_err(|error| Error::open(path, error));
        let project = |schema: &Schema| {
            columns.iter().filter_map(|name| schema.index_of(name).ok()).collect::<Vec<_>>()
        };
        match self.format {
            Format::Csv => {
                let names = schema_of(path, self.format)?;
                // Types are those of the first file: this one's first rows alone might look narrower.
                let fields = names.fields().iter().map(|field| {
                    match self.schema.field_with_name(field.name()) {
                        Ok(known) => known.clone(),
                        Err(_) => field.as_ref().clone(),
                    }
                });
                let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
                let reader = arrow_csv::ReaderBuilder::new(Arc::clone(&schema))
                    .with_header(true)
                    .with_batch_size(most);
                let reader = reader
                    .with_projection(project(&schema))
                    .build_buffered(file()?)
                    .map_err(failed)?;
                Ok((schema, Box::new(reader)))
            }
            _ => match FileReader::try_new(file()?, None) {
                Ok(reader) => {
                    let schema = reader.schema();
                    let reader =
                        FileReader::try_new(file()?, Some(project(&schema))).map_err(failed)?;
                    Ok((schema, Box::new(reader)))
                }
                Err(_) => {
                    let schema = StreamReader::try_new(file()?, None).map_err(failed)?.schema();
                    let reader =
                        StreamReader::try_new(file()?, Some(project(&schema))).map_err(failed)?;
                    Ok((schema, Box::new(reader)))
                }
            },
        }
    }
}

fn schema_of(path: &Path, format: Format) -> Result<SchemaRef> {
    let name = path.display().to_string();
    let mut file =
        File::open(path).map(BufReader::new).map_err(|error| Error::open(path, error))?;
    if format == Format::Csv {
        let inferred = arrow_csv::reader::Format::default()
            .with_header(true)
            .infer_schema(file, Some(LOOKED_AT));
        let (schema, _) = inferred.map_err(|error| Error::arrow(&name, &error))?;
        return match schema.fields().is_empty() {
            true => Err(Error::data(name, "the file is empty: its first line names the columns")),
            false => Ok(Arc::new(schema)),
        };
    }
    if let Ok(reader) = FileReader::try_new(&mut file, None) {
        return Ok(reader.schema());
    }
    file.rewind().map_err(|error| Error::open(path, error))?;
    let broken =
        |error| Error::data(name, format!("not a whole Arrow file ({error}): write it again"));
    Ok(StreamReader::try_new(file, None).map_err(broken)?.schema())
}
