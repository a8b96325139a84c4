//! What every mode shares: the job on the command line, the rewritten inputs, the clock and the check.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;

use deuteron_collective::Element;
use half::bf16;
use rustix::time::{ClockId, clock_gettime};

/// Any error; it ends the rank.
pub type Failure = Box<dyn std::error::Error>;

// The input of rank r is in[i] = ((i + shift) % PERIOD + r) % VALUES, and the shift changes from call to
// call. Sums of up to 16 ranks are whole numbers below 256: exact in bf16, whatever the order.
const PERIOD: usize = 1021;
const VALUES: usize = 13;
const SHIFTS: usize = 8;

/// An element type of the benchmark.
pub trait Number: Element + PartialEq {
    /// Zero, to fill new memory with.
    const ZERO: Self;
    /// The value as f32.
    fn widen(self) -> f32;
    /// The nearest value to a finite f32, ties to even.
    fn narrow(value: f32) -> Self;
}

impl Number for f32 {
    const ZERO: Self = 0.0;
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }
}

impl Number for bf16 {
    const ZERO: Self = Self::ZERO;
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        Self::from_bits(((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16)
    }
}

/// One thing to measure: all calls of one type and size.
pub struct Block {
    kind: String,
    bytes: usize,
    calls: usize,
    warmups: usize,
}

impl Block {
    fn parse(text: &str) -> Result<Self, Failure> {
        let parts: Vec<&str> = text.split(':').collect();
        let [kind, bytes, calls, warmups] = parts[..] else {
            return Err(format!("{text} is not type:bytes:calls:warmups").into());
        };
        Ok(Self {
            kind: kind.into(),
            bytes: bytes.parse()?,
            calls: calls.parse()?,
            warmups: warmups.parse()?,
        })
    }

    /// Elements of one rank's buffer.
    pub fn count<T>(&self) -> usize {
        self.bytes / size_of::<T>()
    }
}

/// What one rank has to do.
pub struct Job {
    /// What its files are called, before a dot and more.
    pub out: String,
    /// This rank.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// Where they meet: an address, or a descriptor for `loop`.
    pub meeting: String,
    /// What to measure, in this order.
    pub blocks: Vec<Block>,
}

impl Job {
    /// Reads `OUT RANK RANKS MEETING BLOCK...`.
    pub fn parse(arguments: &[String]) -> Result<Self, Failure> {
        let [out, rank, ranks, meeting, blocks @ ..] = arguments else {
            return Err("needs OUT RANK RANKS MEETING BLOCK...".into());
        };
        Ok(Self {
            out: out.clone(),
            rank: rank.parse()?,
            ranks: ranks.parse()?,
            meeting: meeting.clone(),
            blocks: blocks.iter().map(|text| Block::parse(text)).collect::<Result<_, _>>()?,
        })
    }

    /// The largest buffer any block needs.
    pub fn largest(&self) -> usize {
        self.blocks.iter().map(|block| block.bytes).max().unwrap_or(0)
    }

    /// Measures every block and writes the rank's file.
    pub fn run(&self, mode: &mut impl Mode) -> Result<(), Failure> {
        let mut file = BufWriter::new(File::create(format!("{}.{}", self.out, self.rank))?);
        for block in &self.blocks {
            let times = match block.kind.as_str() {
                "f32" => mode.measure::<f32>(self, block)?,
                "bf16" => mode.measure::<bf16>(self, block)?,
                other => return Err(format!("no type is called {other}").into()),
            };
            write!(file, "{} {}", block.kind, block.bytes)?;
            for time in times {
                write!(file, " {time}")?;
            }
            writeln!(file)?;
        }
        Ok(file.flush()?)
    }
}

/// A way to do the exchange; it makes a contestant for each block.
pub trait Mode {
    /// Makes the block's contestant and hands it to [`measure`].
    fn measure<T: Number>(&mut self, job: &Job, block: &Block) -> Result<Vec<u64>, Failure>;
}

/// One block's buffers and how they are exchanged.
pub trait Contestant<T> {
    /// Rewritten before each call.
    fn input(&mut self) -> &mut [T];
    /// Where the result is after the call.
    fn output(&self) -> &[T];
    /// Whose inputs the result is the sum of.
    fn summed(&self) -> Range<usize>;
    /// Waits until all ranks have come; not timed.
    fn barrier(&mut self) -> Result<(), Failure>;
    /// The timed call.
    fn call(&mut self) -> Result<(), Failure>;
    /// Turns the two ends of the call, in nanoseconds, into its time; not timed itself.
    fn elapsed(&mut self, start: u64, end: u64) -> Result<u64, Failure> {
        Ok(end - start)
    }
}

/// Runs one block: rewrite, barrier, timed call, barrier. First and last results are checked, every element.
pub fn measure<T: Number>(
    job: &Job,
    block: &Block,
    contestant: &mut impl Contestant<T>,
) -> Result<Vec<u64>, Failure> {
    let count = block.count::<T>();
    let source: Vec<T> = (0..count + SHIFTS).map(|i| value(i, job.rank)).collect();
    let mut times = Vec::with_capacity(block.calls);
    for call in 0..block.warmups + block.calls {
        let shift = call % SHIFTS;
        contestant.input().copy_from_slice(&source[shift..shift + count]);
        contestant.barrier()?;
        let start = nanoseconds();
        contestant.call()?;
        let end = nanoseconds();
        let time = contestant.elapsed(start, end)?;
        // A rank that rewrites its buffer already would keep one that shares its core from seeing the end.
        contestant.barrier()?;
        if call >= block.warmups {
            times.push(time);
        }
        let last = call + 1 == block.warmups + block.calls;
        if (call == 0 || last) && !is_sum(contestant.output(), contestant.summed(), shift) {
            return Err(format!("wrong result for {} bytes of {}", block.bytes, block.kind).into());
        }
    }
    Ok(times)
}

fn value<T: Number>(index: usize, rank: usize) -> T {
    T::narrow(((index % PERIOD + rank) % VALUES) as f32)
}

fn is_sum<T: Number>(result: &[T], ranks: Range<usize>, shift: usize) -> bool {
    let sum = |i| ranks.clone().map(|rank| value::<T>(i + shift, rank).widen()).sum();
    let expected: Vec<T> = (0..PERIOD).map(|i| T::narrow(sum(i))).collect();
    result.chunks(PERIOD).all(|chunk| chunk == &expected[..chunk.len()])
}

fn nanoseconds() -> u64 {
    clock(ClockId::Monotonic)
}

/// What this process has computed so far, on all of its threads.
pub fn cpu_nanoseconds() -> u64 {
    clock(ClockId::ProcessCPUTime)
}

fn clock(id: ClockId) -> u64 {
    let now = clock_gettime(id);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
