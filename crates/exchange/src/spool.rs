//! Rows in a file without a name, mapped: any row can be looked at, at any time, and nothing is left behind.

use crate::{
    Error, Filter, Layout, Result, filter,
    memory::Mapping,
    source::{Parquet, Sequence},
};
use arrow_array::{RecordBatch, RecordBatchReader};
use rustix::fs::{CWD, Mode, OFlags, openat};
use std::{
    env,
    fs::{self, File, OpenOptions},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// Bytes of packed rows that are written, or handed on, at a time.
const PART: usize = 4 << 20;
/// Most rows that are read at a time.
const MOST: usize = 8192;

/// Rows that are read at a time, so that wide ones do not fill the memory.
pub(crate) fn part(layout: &Layout) -> usize {
    (PART / layout.width().max(1)).clamp(1, MOST)
}

/// All rows, packed.
pub(crate) struct Spool {
    mapping: Mapping,
    width: usize,
    rows: u64,
}

impl Spool {
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    pub(crate) fn row(&self, row: u64) -> &[u8] {
        let start = row as usize * self.width;
        &self.mapping.bytes()[start..start + self.width]
    }

    /// Rows of Parquet files, in their order, by several threads.
    pub(crate) fn of_parquet(
        parquet: &Arc<Parquet>,
        layout: &Arc<Layout>,
        columns: &[String],
        folder: &Folder,
        threads: usize,
    ) -> Result<Self> {
        let file = Arc::new(folder.file()?);
        let sizes = parquet.sizes();
        let mut starts = vec![0];
        sizes.iter().for_each(|rows| starts.push(starts[starts.len() - 1] + rows));
        let rows = starts[sizes.len()];
        let write = {
            let (file, folder, layout) = (Arc::clone(&file), folder.clone(), Arc::clone(layout));
            let columns = columns.to_vec();
            move |parquet: &Parquet, unit: usize| {
                let mut packed = Vec::new();
                parquet.read(unit, &columns, None, part(&layout), &mut |batch, first| {
                    packed.clear();
                    layout.pack(&batch, first, &mut packed)?;
                    folder.write(&file, &packed, (starts[unit] + first) * layout.width() as u64)?;
                    Ok(true)
                })
            }
        };
        let mut written = parquet.over_units(threads, write)?;
        while let Some(unit) = written.next() {
            unit?;
        }
        Self::map(&file, layout, rows, folder.random)
    }

    /// Rows that come one after the other.
    pub(crate) fn of_sequence(
        sequence: &Sequence,
        layout: &Layout,
        columns: &[String],
        filters: &[Filter],
        folder: &Folder,
    ) -> Result<Self> {
        let mut writer = Writer::new(layout, filters, folder)?;
        sequence.read(columns, part(layout), &mut |batch, first| {
            writer.write(batch, first)?;
            Ok(true)
        })?;
        writer.finish()
    }

    /// Rows of a stream.
    pub(crate) fn of_stream(
        stream: Box<dyn RecordBatchReader + Send>,
        layout: &Layout,
        filters: &[Filter],
        folder: &Folder,
    ) -> Result<Self> {
        let mut writer = Writer::new(layout, filters, folder)?;
        let most = part(layout);
        let mut first = 0;
        for batch in stream {
            let batch = batch.map_err(|error| Error::arrow("the stream", &error))?;
            for start in (0..batch.num_rows()).step_by(most) {
                let rows = most.min(batch.num_rows() - start);
                writer.write(batch.slice(start, rows), first)?;
                first += rows as u64;
            }
        }
        writer.finish()
    }

    fn map(file: &File, layout: &Layout, rows: u64, random: bool) -> Result<Self> {
        let width = layout.width();
        let own = file.try_clone().map_err(|error| Error::system("cannot keep a spool", error))?;
        let mapping = Mapping::new(own, rows as usize * width, random)?;
        Ok(Self { mapping, width, rows })
    }
}

struct Writer<'a> {
    layout: &'a Layout,
    filters: &'a [Filter],
    folder: &'a Folder,
    file: File,
    packed: Vec<u8>,
    rows: u64,
}

impl<'a> Writer<'a> {
    fn new(layout: &'a Layout, filters: &'a [Filter], folder: &'a Folder) -> Result<Self> {
        Ok(Self { layout, filters, folder, file: folder.file()?, packed: Vec::new(), rows: 0 })
    }

    fn write(&mut self, batch: RecordBatch, first: u64) -> Result<()> {
        let batch = filter::apply(self.filters, batch)?;
        self.packed.clear();
        self.layout.pack(&batch, first, &mut self.packed)?;
        self.folder.write(&self.file, &self.packed, self.rows * self.layout.width() as u64)?;
        self.rows += batch.num_rows() as u64;
        Ok(())
    }

    fn finish(self) -> Result<Spool> {
        Spool::map(&self.file, self.layout, self.rows, self.folder.random)
    }
}

/// Where spools lie.
#[derive(Clone)]
pub(crate) struct Folder {
    path: PathBuf,
    random: bool,
}

impl Folder {
    /// This one, or that of the user's temporary files; by default one that survives memory, since spools may be large.
    pub(crate) fn new(path: Option<&Path>, random: bool) -> Self {
        let set = || env::var_os("TMPDIR").map(PathBuf::from);
        let large = || Some(PathBuf::from("/var/tmp")).filter(|folder| folder.is_dir());
        let path =
            path.map(Path::to_owned).or_else(set).or_else(large).unwrap_or_else(env::temp_dir);
        Self { path, random }
    }

    /// A file without a name: whatever happens, it is gone with its last descriptor.
    fn file(&self) -> Result<File> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        if let Ok(file) = openat(CWD, &self.path, flags, Mode::RUSR | Mode::WUSR) {
            return Ok(file.into());
        }
        // Some file systems know only files with names: it has one for a moment.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("deuteron-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = self.path.join(name);
        let opened =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let failed = |error| {
            Error::system(
                format!(
                    "cannot make a spool in {}: name another folder with spool=",
                    self.path.display()
                ),
                error,
            )
        };
        let file = opened.map_err(failed)?;
        fs::remove_file(&path).map_err(failed)?;
        Ok(file)
    }

    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> Result<()> {
        let failed = |error| {
            Error::system(
                format!(
                    "cannot write a spool in {}: name another folder with spool=",
                    self.path.display()
                ),
                error,
            )
        };
        file.write_all_at(bytes, offset).map_err(failed)
    }
}
