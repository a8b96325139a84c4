//! From a source to the mini-batches of one rank.
//!
//! Parquet files whose rows are not mixed with all others are read as they are needed. Everything else becomes a spool
//! first, of which rows are drawn.

use crate::{
    DType, Error, Filter, Layout, Request, Result, Source,
    deal::{Dealt, Work, deal},
    memory::{Buffer, Pool, ask_for},
    plan::{Order, Plan, Share, Shuffle},
    source::{Format, Parquet, Sequence},
    spool::{Folder, Spool, part},
};
use arrow_schema::Schema;
use std::{
    ops::Range, path::PathBuf, ptr::NonNull, sync::Arc, thread::available_parallelism,
    time::Instant,
};

/// Parts of a unit that a thread reads ahead.
const AHEAD: usize = 2;
/// Rows between the one that is copied and the one that is asked for.
const SOON: usize = 16;
/// More threads than this do not read faster.
const THREADS: usize = 8;

/// What is wanted of a source.
#[derive(Clone, Debug)]
pub struct Options {
    /// How rows become steps.
    pub order: Order,
    /// Whose mini-batches.
    pub rank: u64,
    /// Names of the columns; `None`: all.
    pub columns: Option<Vec<String>>,
    /// What is special about some of them.
    pub requests: Vec<Request>,
    /// Only rows that pass all.
    pub filters: Vec<Filter>,
    /// Whether a NaN is an error.
    pub refuse_nan: bool,
    /// Mini-batches that are made before anybody asks for them.
    pub prefetch: usize,
    /// Threads that read; `None`: as many as there are cores, up to eight.
    pub threads: Option<usize>,
    /// Where spools lie.
    pub folder: Option<PathBuf>,
}

enum Rows {
    Spool(Arc<Spool>),
    Parquet(Arc<Parquet>),
}

/// A source, opened for one rank.
pub struct Dataset {
    rows: Rows,
    layout: Arc<Layout>,
    plan: Plan,
    rank: u64,
    columns: Vec<String>,
    prefetch: usize,
    threads: usize,
    pool: Arc<Pool>,
}

impl Dataset {
    /// Opens a source. What must be known of all rows before the first step is read here.
    pub fn open(source: Source, options: Options) -> Result<Self> {
        let Options { order, rank, filters, prefetch, .. } = &options;
        let cores = available_parallelism().map_or(1, usize::from).min(THREADS);
        let threads = options.threads.unwrap_or(cores).max(1);
        let folder = Folder::new(options.folder.as_deref(), order.shuffle == Shuffle::Full);
        let (rows, layout, columns, sizes) = match source {
            Source::Stream(stream) => {
                let (layout, _) = wanted(&stream.schema(), &options)?;
                let spool = Spool::of_stream(stream, &layout, filters, &folder)?;
                spooled(spool, layout)
            }
            Source::Files(paths) => match Format::of_all(&paths)? {
                Format::Parquet => {
                    let parquet = Parquet::open(paths)?;
                    let (layout, columns) = wanted(&parquet.schema()?.as_ref().clone(), &options)?;
                    parquet.check(&columns)?;
                    let parquet = Arc::new(parquet.filter(filters.clone(), threads)?);
                    if order.shuffle == Shuffle::Full {
                        let layout = Arc::new(layout);
                        let spool =
                            Spool::of_parquet(&parquet, &layout, &columns, &folder, threads)?;
                        spooled(spool, layout)
                    } else {
                        let layout = Arc::new(layout);
                        meet(&parquet, &layout, threads)?;
                        let sizes = parquet.sizes();
                        (Rows::Parquet(parquet), layout, columns, sizes)
                    }
                }
                format => {
                    let sequence = Sequence::open(paths, format)?;
                    let (layout, columns) = wanted(sequence.schema(), &options)?;
                    let spool = Spool::of_sequence(&sequence, &layout, &columns, filters, &folder)?;
                    spooled(spool, layout)
                }
            },
        };
        let plan = Plan::new(&sizes, *order)?;
        plan.share(*rank, 0)?;
        let pool = Pool::new(prefetch + THREADS);
        Ok(Self { rows, layout, plan, rank: *rank, columns, prefetch: *prefetch, threads, pool })
    }

    /// The columns of its mini-batches.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Who sees what when.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The mini-batches of an epoch, from a step on.
    pub fn epoch(&self, epoch: u64, step: u64) -> Result<Batches> {
        let share = Arc::new(self.plan.share(self.rank, epoch)?);
        let steps = self.plan.steps().saturating_sub(step);
        let batch = self.plan.order().batch as usize;
        let (places, bytes) = self.layout.places(batch);
        let maker = Maker {
            layout: Arc::clone(&self.layout),
            pool: Arc::clone(&self.pool),
            places: places.into(),
            bytes,
            rows: batch,
        };
        let dealt = match &self.rows {
            Rows::Spool(spool) => {
                let threads = self.threads.min(self.prefetch).max(1);
                let one = |_| draw(Arc::clone(spool), Arc::clone(&share), maker.clone(), step);
                deal(
                    "draw",
                    steps,
                    (self.prefetch / threads).max(1),
                    (0..threads).map(one).collect(),
                )
            }
            Rows::Parquet(parquet) => {
                let window = self.window(parquet, share, step)?;
                deal("batch", steps, self.prefetch.max(1), vec![window.work(maker, step)])
            }
        };
        Ok(Batches(dealt?))
    }

    fn window(&self, parquet: &Arc<Parquet>, share: Arc<Share>, step: u64) -> Result<Window> {
        let position = step * self.plan.order().batch;
        let start = (position / share.window() * share.window()).min(share.count());
        let ranges =
            share.ranges(start).ok_or(Error::Internal("a full shuffle is not read in ranges"))?;
        let threads = self.threads.min(ranges.len()).max(1);
        let ranges: Arc<[_]> = ranges.into();
        let one = |_| -> Work<Vec<u8>> {
            let (parquet, layout, columns) =
                (Arc::clone(parquet), Arc::clone(&self.layout), self.columns.clone());
            let ranges = Arc::clone(&ranges);
            Box::new(move |item, sink| {
                let range = ranges[item as usize];
                let mut wanted = true;
                parquet.read(
                    range.unit,
                    &columns,
                    Some(range),
                    part(&layout),
                    &mut |batch, first| {
                        let mut packed = Vec::with_capacity(batch.num_rows() * layout.width());
                        layout.pack(&batch, first, &mut packed)?;
                        wanted = sink.put(packed, false);
                        Ok(wanted)
                    },
                )?;
                Ok(wanted && sink.put(Vec::new(), true))
            })
        };
        let parts = deal("read", ranges.len() as u64, AHEAD, (0..threads).map(one).collect())?;
        let width = self.layout.width();
        Ok(Window {
            share,
            parts,
            part: Vec::new(),
            used: 0,
            rows: Vec::new(),
            current: None,
            width,
        })
    }
}

fn spooled(
    spool: Spool,
    layout: impl Into<Arc<Layout>>,
) -> (Rows, Arc<Layout>, Vec<String>, Vec<u64>) {
    let layout = layout.into();
    layout.sort();
    let sizes = vec![spool.rows()];
    (Rows::Spool(Arc::new(spool)), layout, Vec::new(), sizes)
}

/// The layout of the columns that are wanted, and the names of all that are read.
fn wanted(schema: &Schema, options: &Options) -> Result<(Layout, Vec<String>)> {
    let all = || schema.fields().iter().map(|field| field.name().clone()).collect();
    let names: Vec<String> = options.columns.clone().unwrap_or_else(all);
    if let Some(request) = options.requests.iter().find(|request| !names.contains(&request.name)) {
        return Err(Error::Invalid(format!(
            "column {:?} is described and not wanted: name it in columns",
            request.name
        )));
    }
    let described = |name: &String| {
        let special = options.requests.iter().find(|request| request.name == *name).cloned();
        special.unwrap_or_else(|| Request { name: name.clone(), ..Request::default() })
    };
    let requests: Vec<Request> = names.iter().map(described).collect();
    let layout = Layout::new(schema, &requests, options.refuse_nan)?;
    for filter in &options.filters {
        let Ok(field) = schema.field_with_name(&filter.column) else {
            return Err(Error::Invalid(format!(
                "there is no column {:?} to filter by",
                filter.column
            )));
        };
        filter.check(field.data_type())?;
    }
    let filtered = options.filters.iter().map(|filter| filter.column.clone());
    let mut columns: Vec<String> = names.into_iter().chain(filtered).collect();
    columns.sort();
    columns.dedup();
    Ok((layout, columns))
}

/// Meets all categories before the first step, so that every rank numbers them the same.
fn meet(parquet: &Arc<Parquet>, layout: &Arc<Layout>, threads: usize) -> Result<()> {
    let columns: Vec<String> = layout.unmet().into_iter().map(str::to_owned).collect();
    if !columns.is_empty() {
        let layout = Arc::clone(layout);
        let mut met = parquet.over_units(threads, move |parquet, unit| {
            parquet.read(unit, &columns, None, part(&layout), &mut |batch, _| {
                layout.meet(&batch).map(|()| true)
            })
        })?;
        while let Some(unit) = met.next() {
            unit?;
        }
    }
    layout.sort();
    Ok(())
}

/// What mini-batches are made with.
#[derive(Clone)]
struct Maker {
    layout: Arc<Layout>,
    pool: Arc<Pool>,
    places: Arc<[usize]>,
    bytes: usize,
    rows: usize,
}

impl Maker {
    fn batch(&self, rows: &[u8]) -> Batch {
        let mut buffer = self.pool.take(self.bytes);
        self.layout.unpack(rows, &self.places, buffer.bytes_mut());
        let (layout, places) = (Arc::clone(&self.layout), Arc::clone(&self.places));
        Batch { layout, places, buffer: Arc::new(buffer), rows: self.rows }
    }
}

/// Copies rows one behind the other.
fn collect<'a>(places: &[u64], row: impl Fn(u64) -> &'a [u8], rows: &mut Vec<u8>) {
    rows.clear();
    for (index, &place) in places.iter().enumerate() {
        if let Some(&soon) = places.get(index + SOON) {
            ask_for(row(soon));
        }
        rows.extend_from_slice(row(place));
    }
}

/// Rows of a spool, drawn in the order of the plan.
fn draw(spool: Arc<Spool>, share: Arc<Share>, maker: Maker, from: u64) -> Work<Batch> {
    let (mut places, mut rows) = (Vec::new(), Vec::new());
    Box::new(move |item, sink| {
        let start = (from + item) * maker.rows as u64;
        places.clear();
        places.extend((start..start + maker.rows as u64).map(|position| share.row(position)));
        collect(&places, |place| spool.row(place), &mut rows);
        Ok(sink.put(maker.batch(&rows), true))
    })
}

/// Rows as they are read, so many at a time, and then in the order of the plan.
struct Window {
    share: Arc<Share>,
    parts: Dealt<Vec<u8>>,
    /// What was read and not yet used, from here on.
    part: Vec<u8>,
    used: usize,
    rows: Vec<u8>,
    current: Option<u64>,
    width: usize,
}

impl Window {
    /// Reads the next window, which begins here.
    fn fill(&mut self, start: u64) -> Result<()> {
        let wanted = self.share.window().min(self.share.count() - start) as usize * self.width;
        self.rows.clear();
        while self.rows.len() < wanted {
            if self.used == self.part.len() {
                let missing = Err(Error::Internal("there are fewer rows than were counted"));
                self.part = self.parts.next().unwrap_or(missing)?;
                self.used = 0;
            }
            let taken = (wanted - self.rows.len()).min(self.part.len() - self.used);
            self.rows.extend_from_slice(&self.part[self.used..self.used + taken]);
            self.used += taken;
        }
        Ok(())
    }

    fn work(mut self, maker: Maker, from: u64) -> Work<Batch> {
        let (mut places, mut drawn) = (Vec::new(), Vec::new());
        Box::new(move |item, sink| {
            let position = (from + item) * maker.rows as u64;
            let window = position / self.share.window();
            let (start, slots) = self.share.slots(window);
            if self.current != Some(window) {
                self.fill(start)?;
                self.current = Some(window);
            }
            let batch = match slots {
                None => maker.batch(&self.rows),
                Some(slots) => {
                    let first = position - start;
                    places.clear();
                    places.extend((first..first + maker.rows as u64).map(|slot| slots.at(slot)));
                    let row = |place: u64| {
                        &self.rows[place as usize * self.width..(place as usize + 1) * self.width]
                    };
                    collect(&places, row, &mut drawn);
                    maker.batch(&drawn)
                }
            };
            Ok(sink.put(batch, true))
        })
    }
}

/// The mini-batches of an epoch, made by threads that end with it.
pub struct Batches(Dealt<Batch>);

impl Batches {
    /// The next one, if there is one by then; inside, `None` after the last.
    pub fn next_until(&mut self, end: Instant) -> Option<Option<Result<Batch>>> {
        self.0.next_until(end)
    }
}

impl Iterator for Batches {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next()
    }
}

/// A mini-batch.
pub struct Batch {
    layout: Arc<Layout>,
    places: Arc<[usize]>,
    buffer: Arc<Buffer>,
    rows: usize,
}

impl Batch {
    /// Its columns, in the order of the layout.
    pub fn into_tensors(self) -> impl Iterator<Item = Tensor> {
        let Self { layout, places, buffer, rows } = self;
        (0..places.len()).map(move |index| {
            let (column, start) = (&layout.columns()[index], places[index]);
            let shape = [&[rows], column.shape()].concat();
            let end = start + column.dtype().size() * shape.iter().product::<usize>();
            Tensor { buffer: Arc::clone(&buffer), place: start..end, dtype: column.dtype(), shape }
        })
    }
}

/// A column of a mini-batch: one stretch of memory, in the order of the rows, that belongs to it alone.
pub struct Tensor {
    buffer: Arc<Buffer>,
    place: Range<usize>,
    /// Of its elements.
    pub dtype: DType,
    /// Rows first.
    pub shape: Vec<usize>,
}

impl Tensor {
    /// Its elements.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.bytes(&self.place)
    }

    /// Where its elements lie. Whoever keeps the tensor may write there, and sees to it that nobody else looks meanwhile.
    pub fn pointer(&self) -> NonNull<[u8]> {
        self.buffer.pointer(&self.place)
    }
}
