//! All rows, packed, of which any can be looked at, at any time: in memory as long as they are few, then in a file
//! without a name, so that nothing is left behind.

use crate::{
    Error, Filter, Layout, Result, filter,
    memory::{Mapping, Region},
    plan::Range,
    source::{Parquet, Sequence, Target},
};
use arrow_array::{RecordBatch, RecordBatchReader};
use rustix::fs::{CWD, Mode, OFlags, openat};
use std::{
    env,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, Builder},
};

/// Bytes of packed rows that are handed on at a time.
const PART: usize = 2 << 20;
/// Bytes of one write: for more the system takes its largest pages, which a virtual machine has often given back to its
/// host, and then it takes seven times as long.
const WRITE: usize = 1 << 20;
/// Most rows that are read at a time.
const MOST: usize = 8192;
/// Most rows that one thread reads before it looks for others: threads end together, and a row group is shared.
const PIECE: u64 = 1 << 17;

/// Rows that are read at a time, so that wide ones do not fill the memory: a power of two.
pub(crate) fn part(layout: &Layout) -> usize {
    1 << (PART / layout.width().max(1)).clamp(1, MOST).ilog2()
}

/// All rows, packed.
pub(crate) struct Spool {
    mapping: Mapping,
    rows: u64,
}

/// Rows that a thread reads before it looks for others, and where they belong.
struct Piece<'a> {
    range: Range,
    place: Place<'a>,
}

enum Place<'a> {
    Memory(&'a mut [u8]),
    File(&'a File, u64),
}

impl Spool {
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// One row after the other.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.mapping.bytes()
    }

    /// Rows of Parquet files, in their order, by several threads.
    pub(crate) fn of_parquet(
        parquet: &Parquet,
        layout: &Layout,
        columns: &[String],
        folder: &Folder,
        threads: usize,
    ) -> Result<Self> {
        let ranges = parquet.ranges(PIECE);
        let rows = ranges.iter().map(|range| range.rows).sum();
        let bytes = rows as usize * layout.width();
        if bytes <= folder.memory {
            let mut region = Region::new(bytes)?;
            let mut left = region.bytes_mut();
            let pieces = ranges.into_iter().map(|range| {
                let memory = left.split_off_mut(..range.rows as usize * layout.width());
                Piece { range, place: Place::Memory(memory.unwrap_or_default()) }
            });
            read(parquet, layout, columns, folder, threads, pieces.collect())?;
            return Ok(Self { mapping: region.keep(), rows });
        }
        let file = folder.file()?;
        let mut end = 0;
        let pieces = ranges.into_iter().map(|range| {
            let start = end;
            end += range.rows * layout.width() as u64;
            Piece { range, place: Place::File(&file, start) }
        });
        read(parquet, layout, columns, folder, threads, pieces.collect())?;
        Self::map(file, layout, rows, folder)
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

    fn map(file: File, layout: &Layout, rows: u64, folder: &Folder) -> Result<Self> {
        let mapping = Mapping::new(file, rows as usize * layout.width(), folder.random)?;
        Ok(Self { mapping, rows })
    }
}

/// Reads all pieces. Of several errors, that of the first piece is told.
fn read(
    parquet: &Parquet,
    layout: &Layout,
    columns: &[String],
    folder: &Folder,
    threads: usize,
    pieces: Vec<Piece<'_>>,
) -> Result<()> {
    let threads = threads.min(pieces.len()).max(1);
    let pieces = Mutex::new(pieces.into_iter().enumerate());
    let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    let work = || {
        let mut packed = Vec::new();
        loop {
            let next = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((index, piece)) = next else { return };
            if let Err(error) = read_one(parquet, layout, columns, folder, piece, &mut packed) {
                // Nobody takes another, and pieces before this one are with somebody already.
                pieces.lock().unwrap_or_else(PoisonError::into_inner).by_ref().for_each(drop);
                let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                if failed.as_ref().is_none_or(|(first, _)| index < *first) {
                    *failed = Some((index, error));
                }
            }
        }
    };
    thread::scope(|scope| -> Result<()> {
        for index in 1..threads {
            let started =
                Builder::new().name(format!("dt-spool-{index}")).spawn_scoped(scope, work);
            started.map_err(|error| Error::system("cannot start a thread", error))?;
        }
        work();
        Ok(())
    })?;
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    failed.map_or(Ok(()), |(_, error)| Err(error))
}

fn read_one(
    parquet: &Parquet,
    layout: &Layout,
    columns: &[String],
    folder: &Folder,
    piece: Piece<'_>,
    packed: &mut Vec<u8>,
) -> Result<()> {
    let width = layout.width();
    let mut target: Box<dyn Target> = match piece.place {
        Place::Memory(left) => Box::new(InMemory { left, width }),
        Place::File(file, end) => Box::new(InFile { folder, file, end, packed, width }),
    };
    parquet.pack(piece.range, layout, columns, part(layout), target.as_mut()).map(drop)
}

struct InMemory<'a> {
    left: &'a mut [u8],
    width: usize,
}

impl Target for InMemory<'_> {
    fn room(&mut self, rows: usize) -> Result<&mut [u8]> {
        let many = Error::Internal("there are more rows than were counted");
        self.left.get_mut(..rows * self.width).ok_or(many)
    }

    fn filled(&mut self, rows: usize) -> Result<bool> {
        Ok(self.left.split_off_mut(..rows * self.width).is_some())
    }
}

struct InFile<'a> {
    folder: &'a Folder,
    file: &'a File,
    end: u64,
    packed: &'a mut Vec<u8>,
    width: usize,
}

impl Target for InFile<'_> {
    fn room(&mut self, rows: usize) -> Result<&mut [u8]> {
        self.packed.resize(rows * self.width, 0);
        Ok(self.packed)
    }

    fn filled(&mut self, rows: usize) -> Result<bool> {
        let packed = &self.packed[..rows * self.width];
        self.folder.write(self.file, packed, self.end)?;
        self.end += packed.len() as u64;
        Ok(true)
    }
}

/// Rows of which nobody knows how many will come.
struct Writer<'a> {
    layout: &'a Layout,
    filters: &'a [Filter],
    folder: &'a Folder,
    place: Growing,
    packed: Vec<u8>,
    rows: u64,
}

enum Growing {
    Memory(Region),
    File(File),
}

impl<'a> Writer<'a> {
    fn new(layout: &'a Layout, filters: &'a [Filter], folder: &'a Folder) -> Result<Self> {
        // What is not written is not there.
        let place = Growing::Memory(Region::new(folder.memory)?);
        Ok(Self { layout, filters, folder, place, packed: Vec::new(), rows: 0 })
    }

    fn write(&mut self, batch: RecordBatch, first: u64) -> Result<()> {
        let batch = filter::apply(self.filters, batch)?;
        let start = self.rows as usize * self.layout.width();
        let bytes = batch.num_rows() * self.layout.width();
        self.rows += batch.num_rows() as u64;
        if let Growing::Memory(region) = &mut self.place {
            if let Some(rows) = region.bytes_mut().get_mut(start..start + bytes) {
                return self.layout.pack(&batch, first, rows);
            }
            let file = self.folder.file()?;
            self.folder.write(&file, &region.bytes_mut()[..start], 0)?;
            self.place = Growing::File(file);
        }
        if let Growing::File(file) = &self.place {
            self.packed.resize(bytes, 0);
            self.layout.pack(&batch, first, &mut self.packed)?;
            self.folder.write(file, &self.packed, start as u64)?;
        }
        Ok(())
    }

    fn finish(self) -> Result<Spool> {
        match self.place {
            Growing::Memory(region) => Ok(Spool { mapping: region.keep(), rows: self.rows }),
            Growing::File(file) => Spool::map(file, self.layout, self.rows, self.folder),
        }
    }
}

/// Where spools lie.
pub(crate) struct Folder {
    path: PathBuf,
    /// Up to so many bytes are kept in memory instead.
    memory: usize,
    random: bool,
}

impl Folder {
    /// This one, or that of the user's temporary files; by default one that survives memory, since spools may be large.
    pub(crate) fn new(path: Option<&Path>, memory: u64, random: bool) -> Self {
        let set = || env::var_os("TMPDIR").map(PathBuf::from);
        let large = || Some(PathBuf::from("/var/tmp")).filter(|folder| folder.is_dir());
        let path =
            path.map(Path::to_owned).or_else(set).or_else(large).unwrap_or_else(env::temp_dir);
        let memory = usize::try_from(memory).unwrap_or(usize::MAX);
        Self { path, memory, random }
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
        let failed = |error: io::Error| {
            let what = format!("{error}: name a folder with room for all rows with spool=");
            Error::data(format!("the spool in {}", self.path.display()), what)
        };
        let mut offset = offset;
        for piece in bytes.chunks(WRITE) {
            file.write_all_at(piece, offset).map_err(failed)?;
            offset += piece.len() as u64;
        }
        Ok(())
    }
}
