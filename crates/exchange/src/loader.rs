//! From a source to the mini-batches of one rank.
//!
//! Parquet files whose rows are not mixed with all others are read as they are needed, a window of rows at a time.
//! Everything else becomes a spool first, of which rows are drawn.

use crate::{
    DType, Error, Filter, Layout, Request, Result, Source,
    deal::{Dealt, Sink, Work, deal},
    layout::Group,
    memory::{Buffer, Pool},
    plan::{self, Order, Plan, Rest, Share, Shuffle},
    source::{Format, Parquet, Sequence, Target},
    spool::{Folder, Spool, part},
};
use arrow_schema::Schema;
use std::{
    collections::VecDeque, ops::Range, path::PathBuf, ptr::NonNull, sync::Arc,
    thread::available_parallelism, time::Instant,
};

/// Parts that a thread reads before it is the next one's turn, and that it may be ahead: else only one would read.
const TURN: usize = 8;
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
    /// Those that are matrices together.
    pub groups: Vec<Group>,
    /// Only rows that pass all.
    pub filters: Vec<Filter>,
    /// Whether a NaN is an error.
    pub refuse_nan: bool,
    /// Mini-batches that are made before anybody asks for them.
    pub prefetch: usize,
    /// Threads that read; `None`: as many as there are cores, up to eight.
    pub threads: Option<usize>,
    /// Bytes of rows that are kept in memory; more lie in a spool.
    pub memory: u64,
    /// Where spools lie.
    pub folder: Option<PathBuf>,
}

impl Options {
    /// All columns as they are, mixed, so many rows at a time, for one of so many ranks; what does not fill a step of all
    /// is left out.
    pub fn new(batch: usize, rank: usize, ranks: usize) -> Self {
        let (batch, rank, ranks) = (batch as u64, rank as u64, ranks as u64);
        Self {
            order: Order { ranks, batch, shuffle: Shuffle::Full, rest: Rest::Drop, seed: 0 },
            rank,
            columns: None,
            requests: Vec::new(),
            groups: Vec::new(),
            filters: Vec::new(),
            refuse_nan: false,
            prefetch: 4,
            threads: None,
            memory: 256 << 20,
            folder: None,
        }
    }
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
    /// Of mini-batches.
    pool: Arc<Pool>,
    /// Of what is read for them.
    parts: Arc<Pool>,
}

impl Dataset {
    /// Opens a source. What must be known of all rows before the first step is read here.
    pub fn open(source: Source, options: Options) -> Result<Self> {
        let Options { order, rank, filters, prefetch, .. } = &options;
        let cores = available_parallelism().map_or(1, usize::from).min(THREADS);
        let threads = options.threads.unwrap_or(cores).max(1);
        let folder =
            Folder::new(options.folder.as_deref(), options.memory, order.shuffle == Shuffle::Full);
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
        let share = plan.share(*rank, 0)?;
        let pool = Pool::new(prefetch + THREADS);
        // Parts of a window that was used up are those of the next, also in the next epoch.
        let part = part(&layout) as u64;
        let window = read_together(&share, part).min(share.count()).div_ceil(part) as usize;
        let parts = Pool::new(window + threads * TURN);
        let (rank, prefetch) = (*rank, *prefetch);
        Ok(Self { rows, layout, plan, rank, columns, prefetch, threads, pool, parts })
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
            block: Vec::new(),
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

    /// Rows as they are read from a step on, and how they are mixed.
    fn window(&self, parquet: &Arc<Parquet>, share: Arc<Share>, step: u64) -> Result<Window> {
        let batch = self.plan.order().batch;
        let part = part(&self.layout) as u64;
        let rows = read_together(&share, part);
        let start = (step * batch / rows * rows).min(share.count());
        // Which rows of a unit pass filters is known only after those before them were read.
        let turns = turns(&share, start, rows, part, parquet.is_filtered())?;
        let threads = self.threads.min(turns.len()).max(1);
        let turns: Arc<[_]> = turns.into();
        let one = |_| -> Work<Buffer> {
            let (parquet, layout, columns) =
                (Arc::clone(parquet), Arc::clone(&self.layout), self.columns.clone());
            let turns = Arc::clone(&turns);
            let pool = Arc::clone(&self.parts);
            Box::new(move |item, sink| {
                turns[item as usize].read(&parquet, &layout, &columns, &pool, sink)
            })
        };
        let parts = deal("read", turns.len() as u64, TURN, (0..threads).map(one).collect())?;
        let width = self.layout.width();
        Ok(Window { share, parts, rows, part, filled: Vec::new(), current: None, width })
    }
}

/// Rows of which a window consists as it is read: small ones are read together.
fn read_together(share: &Share, part: u64) -> u64 {
    share.window() * (part / share.window()).max(1)
}

/// What one thread reads before it is the next one's turn: ranges, and the rows of each part that is made of them.
struct Turn {
    ranges: Vec<plan::Range>,
    parts: Vec<u64>,
}

/// Turns from a position on. Parts have `part` rows, except at the end of a window. With `whole`, a turn does not end
/// within a range that it began, but for a part of it.
fn turns(share: &Share, start: u64, window: u64, part: u64, whole: bool) -> Result<Vec<Turn>> {
    let ranges =
        share.ranges(start).ok_or(Error::Internal("a full shuffle is not read in ranges"))?;
    let mut ranges = ranges.into_iter();
    let mut range = ranges.next();
    let (mut turns, mut position) = (Vec::new(), start);
    while position < share.count() {
        let mut turn = Turn { ranges: Vec::new(), parts: Vec::new() };
        let end = position + range.filter(|_| whole).map_or(0, |range| range.rows);
        while (turn.parts.len() < TURN || position < end) && position < share.count() {
            let left = (window - position % window).min(share.count() - position);
            turn.parts.push(part.min(left));
            position += part.min(left);
        }
        let mut rows: u64 = turn.parts.iter().sum();
        while rows > 0
            && let Some(plan::Range { unit, start, rows: left }) = range
        {
            let taken = rows.min(left);
            turn.ranges.push(plan::Range { unit, start, rows: taken });
            rows -= taken;
            let rest = plan::Range { unit, start: start + taken, rows: left - taken };
            range = if rest.rows > 0 { Some(rest) } else { ranges.next() };
        }
        turns.push(turn);
    }
    Ok(turns)
}

impl Turn {
    /// Whether anybody wants more.
    fn read(
        &self,
        parquet: &Parquet,
        layout: &Layout,
        columns: &[String],
        pool: &Arc<Pool>,
        sink: &Sink<Buffer>,
    ) -> Result<bool> {
        let parts = self.parts.iter().map(|&rows| rows as usize * layout.width());
        let mut target = InParts { parts: parts.collect(), pool, part: None, end: 0, sink, layout };
        for &range in &self.ranges {
            if !parquet.pack(range, layout, columns, part(layout), &mut target)? {
                return Ok(false);
            }
        }
        match target.parts.is_empty() {
            true => Ok(true),
            false => Err(Error::Internal("there are fewer rows than were counted")),
        }
    }
}

/// Rows that are handed on in parts.
struct InParts<'a> {
    /// Bytes of those to come.
    parts: VecDeque<usize>,
    pool: &'a Arc<Pool>,
    part: Option<Buffer>,
    /// What of it is filled.
    end: usize,
    sink: &'a Sink<Buffer>,
    layout: &'a Layout,
}

impl Target for InParts<'_> {
    fn room(&mut self, rows: usize) -> Result<&mut [u8]> {
        let many = Error::Internal("there are more rows than were counted");
        let end = self.end + rows * self.layout.width();
        let end = end.min(*self.parts.front().ok_or(many)?);
        // All have the same size, so that each can be any other.
        let new = || self.pool.take(part(self.layout) * self.layout.width());
        Ok(&mut self.part.get_or_insert_with(new).bytes_mut()[self.end..end])
    }

    fn filled(&mut self, rows: usize) -> Result<bool> {
        self.end += rows * self.layout.width();
        if self.parts.front().is_some_and(|bytes| self.end < *bytes) {
            return Ok(true);
        }
        self.end = 0;
        self.parts.pop_front();
        let full = self.part.take().ok_or(Error::Internal("there is no part to hand on"))?;
        Ok(self.sink.put(full, self.parts.is_empty()))
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
    let layout = Layout::new(schema, &requests, &options.groups, options.refuse_nan)?;
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
    block: Vec<u8>,
}

impl Maker {
    /// A mini-batch of these rows.
    fn batch<'a>(&mut self, rows: &[u64], row: impl Fn(u64) -> &'a [u8]) -> Batch {
        let mut buffer = self.pool.take(self.bytes);
        self.layout.draw(rows, row, &self.places, &mut self.block, buffer.bytes_mut());
        let (layout, places) = (Arc::clone(&self.layout), Arc::clone(&self.places));
        Batch { layout, places, buffer: Arc::new(buffer), rows: self.rows }
    }
}

/// Rows of a spool, drawn in the order of the plan.
fn draw(spool: Arc<Spool>, share: Arc<Share>, mut maker: Maker, from: u64) -> Work<Batch> {
    let mut drawn = Vec::new();
    Box::new(move |item, sink| {
        let start = (from + item) * maker.rows as u64;
        drawn.clear();
        drawn.extend((start..start + maker.rows as u64).map(|position| share.row(position)));
        let (width, bytes) = (maker.layout.width(), spool.bytes());
        let row = |row: u64| &bytes[row as usize * width..][..width];
        Ok(sink.put(maker.batch(&drawn, row), true))
    })
}

/// Rows as they are read, so many at a time, and then in the order of the plan.
struct Window {
    share: Arc<Share>,
    parts: Dealt<Buffer>,
    /// Of a window.
    rows: u64,
    /// Of each of its parts; the last may have fewer.
    part: u64,
    filled: Vec<Buffer>,
    current: Option<u64>,
    width: usize,
}

impl Window {
    /// Reads the next window, which begins here.
    fn fill(&mut self, start: u64) -> Result<()> {
        let rows = self.rows.min(self.share.count() - start);
        self.filled.clear();
        for _ in 0..rows.div_ceil(self.part) {
            let missing = Err(Error::Internal("there are fewer rows than were counted"));
            self.filled.push(self.parts.next().unwrap_or(missing)?);
        }
        Ok(())
    }

    fn work(mut self, mut maker: Maker, from: u64) -> Work<Batch> {
        let mut drawn = Vec::new();
        Box::new(move |item, sink| {
            let position = (from + item) * maker.rows as u64;
            let start = position / self.rows * self.rows;
            if self.current != Some(start) {
                self.fill(start)?;
                self.current = Some(start);
            }
            let (first, mixed) = self.share.slots(position / self.share.window());
            let slots = position - first..position - first + maker.rows as u64;
            let read = |slot: u64| mixed.as_ref().map_or(slot, |mixed| mixed.at(slot));
            drawn.clear();
            drawn.extend(slots.map(|slot| first - start + read(slot)));
            let (part, width) = (self.part.ilog2(), self.width);
            let row = |slot: u64| {
                let within = slot as usize & ((1 << part) - 1);
                let start = within * width;
                self.filled[(slot >> part) as usize].bytes(&(start..start + width))
            };
            Ok(sink.put(maker.batch(&drawn, row), true))
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
    /// Its tensors, in the order of the layout's fields.
    pub fn into_tensors(self) -> impl Iterator<Item = Tensor> {
        let Self { layout, places, buffer, rows } = self;
        (0..places.len()).map(move |index| {
            let (field, start) = (&layout.fields()[index], places[index]);
            let shape = [&[rows], field.shape()].concat();
            let end = start + field.dtype().size() * shape.iter().product::<usize>();
            Tensor { buffer: Arc::clone(&buffer), place: start..end, dtype: field.dtype(), shape }
        })
    }
}

/// A tensor of a mini-batch: one stretch of memory, in the order of the rows, that belongs to it alone.
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
