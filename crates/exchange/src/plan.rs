//! Which rank sees which row at which step: a pure function of sizes, ranks, seed and epoch.
//!
//! - PL-1: every rank has the same number of steps, and every step has the same number of rows.
//! - PL-2: with [`Shuffle::Full`], what all ranks see at a step is one stretch of one permutation of all rows: the same
//!   rows in the same order for any number of ranks with the same product of ranks and rows of a step.
//! - PL-3: without it, a rank reads one stretch of all units, whose order changes with the epoch if rows are shuffled. A
//!   unit is shared by as many ranks as it takes.
//! - PL-4: nothing depends on what came before, so that an epoch can begin at any step.
//!
//! No permutation is kept in memory: it is computed where it is looked at.

use crate::{Error, Result};

/// How rows are mixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shuffle {
    /// Not at all: a rank sees its stretch of the rows in their order.
    None,
    /// The units of a source, and then the rows within so many at a time. Rounded up to whole mini-batches.
    Buffer(u64),
    /// All rows with each other.
    Full,
}

/// What becomes of the rows that do not fill a step of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// They are left out in this epoch.
    Drop,
    /// The step is filled up with rows that this epoch has already.
    Pad,
}

/// What a plan is made from, besides the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// How many ranks share the rows.
    pub ranks: u64,
    /// Rows of one mini-batch of one rank.
    pub batch: u64,
    /// How they are mixed.
    pub shuffle: Shuffle,
    /// What becomes of the rest.
    pub rest: Rest,
    /// Another seed, another order.
    pub seed: u64,
}

/// What every rank does in every epoch.
///
/// ```
/// use deuteron_exchange::plan::{Order, Plan, Rest, Shuffle};
///
/// let order = Order { ranks: 4, batch: 8, shuffle: Shuffle::Full, rest: Rest::Drop, seed: 7 };
/// let plan = Plan::new(&[100, 3], order)?;
/// assert_eq!(plan.steps(), 3);
/// assert!(plan.share(3, 0)?.row(0) < 103);
/// # Ok::<(), deuteron_exchange::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where each unit begins; one more than units.
    starts: Vec<u64>,
    order: Order,
    steps: u64,
}

/// Rows of one unit, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Which unit.
    pub unit: usize,
    /// Its first row.
    pub start: u64,
    /// How many.
    pub rows: u64,
}

impl Plan {
    /// A plan for units of so many rows.
    pub fn new(units: &[u64], order: Order) -> Result<Self> {
        let Order { ranks, batch, rest, .. } = order;
        if ranks == 0 || batch == 0 {
            return Err(Error::Invalid("batch_size and size must be at least 1".into()));
        }
        if order.shuffle == Shuffle::Buffer(0) {
            return Err(Error::Invalid("buffer must be at least 1 row".into()));
        }
        let starts = starts(units.iter().copied());
        let rows = starts.last().copied().unwrap_or_default();
        if rows == 0 {
            return Err(Error::Invalid(
                "there are no rows: the source is empty, or its filters leave none".into(),
            ));
        }
        let whole = ranks
            .checked_mul(batch)
            .ok_or_else(|| Error::Invalid(format!("a batch_size of {batch} is too large")))?;
        let steps = match rest {
            Rest::Drop => rows / whole,
            Rest::Pad => rows.div_ceil(whole),
        };
        if steps == 0 {
            let have =
                format!("{rows} rows do not fill one step of {ranks} ranks with {batch} rows each");
            return Err(Error::Invalid(format!(
                "{have}: take a smaller batch_size, or rest=\"pad\""
            )));
        }
        Ok(Self { starts, order, steps })
    }

    /// Rows of all units.
    pub fn rows(&self) -> u64 {
        self.starts.last().copied().unwrap_or_default()
    }

    /// Steps of an epoch, the same for every rank.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// What it was made from.
    pub fn order(&self) -> &Order {
        &self.order
    }

    /// What one rank sees in one epoch.
    pub fn share(&self, rank: u64, epoch: u64) -> Result<Share> {
        let Order { ranks, batch, shuffle, seed, .. } = self.order;
        if rank >= ranks {
            return Err(Error::Invalid(format!("there is no rank {rank} among {ranks}")));
        }
        let key = mix(mix(seed).wrapping_add(epoch));
        let units = self.starts.len() as u64 - 1;
        let deal = match shuffle {
            Shuffle::Full => Deal::Full(Permutation::new(self.rows(), key)),
            Shuffle::Buffer(_) => {
                let permutation = Permutation::new(units, key);
                Deal::Stretch((0..units).map(|unit| permutation.at(unit) as usize).collect())
            }
            Shuffle::None => Deal::Stretch((0..units as usize).collect()),
        };
        let window = match shuffle {
            Shuffle::Buffer(rows) => rows.div_ceil(batch) * batch,
            _ => batch,
        };
        let bounds = match &deal {
            Deal::Full(_) => Vec::new(),
            Deal::Stretch(order) => {
                starts(order.iter().map(|&unit| self.starts[unit + 1] - self.starts[unit]))
            }
        };
        let count = self.steps * batch;
        let mixed = matches!(shuffle, Shuffle::Buffer(_));
        Ok(Share {
            starts: self.starts.clone(),
            deal,
            bounds,
            rank,
            ranks,
            batch,
            count,
            window,
            mixed,
            key,
        })
    }
}

fn starts(sizes: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut starts = vec![0];
    let mut end = 0;
    starts.extend(sizes.map(|rows| {
        end += rows;
        end
    }));
    starts
}

#[derive(Clone, Debug)]
enum Deal {
    /// Steps go through one permutation of all rows.
    Full(Permutation),
    /// A stretch of all units in this order.
    Stretch(Vec<usize>),
}

/// What one rank sees in one epoch: a row for every position, and positions count on through the steps.
#[derive(Clone, Debug)]
pub struct Share {
    starts: Vec<u64>,
    deal: Deal,
    /// Where each unit begins in the order of this epoch.
    bounds: Vec<u64>,
    rank: u64,
    ranks: u64,
    batch: u64,
    /// Positions of this rank.
    count: u64,
    window: u64,
    mixed: bool,
    key: u64,
}

impl Share {
    /// Positions of this rank: steps times rows of a step.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Positions that are mixed with each other: whole mini-batches.
    pub fn window(&self) -> u64 {
        self.window
    }

    /// The number, among all rows of all units, of the row at a position.
    pub fn row(&self, position: u64) -> u64 {
        let rows = self.starts[self.starts.len() - 1];
        match &self.deal {
            Deal::Full(permutation) => {
                let (step, within) = (position / self.batch, position % self.batch);
                permutation
                    .at((step * self.ranks * self.batch + self.rank * self.batch + within) % rows)
            }
            Deal::Stretch(order) => {
                let (start, slots) = self.slots(position / self.window);
                let slot =
                    slots.as_ref().map_or(position - start, |slots| slots.at(position - start));
                let read = (self.rank * self.count + start + slot) % rows;
                let index = self.bounds.partition_point(|&bound| bound <= read) - 1;
                self.starts[order[index]] + read - self.bounds[index]
            }
        }
    }

    /// Where a window begins, and in which order its rows, as they are read, are seen; `None`: in that one.
    pub(crate) fn slots(&self, window: u64) -> (u64, Option<Permutation>) {
        let start = window * self.window;
        let rows = self.window.min(self.count - start);
        let key = || mix(self.key ^ mix(self.rank * self.count + start));
        (start, self.mixed.then(|| Permutation::new(rows, key())))
    }

    /// What is read, in this order, from a position that begins a window. `None` if rows are read one by one.
    pub fn ranges(&self, position: u64) -> Option<Vec<Range>> {
        let Deal::Stretch(order) = &self.deal else { return None };
        let rows = self.starts[self.starts.len() - 1];
        let (mut next, mut left) = (self.rank * self.count + position, self.count - position);
        let mut ranges = Vec::new();
        while left > 0 {
            let read = next % rows;
            let index = self.bounds.partition_point(|&bound| bound <= read) - 1;
            let taken = left.min(self.bounds[index + 1] - read);
            ranges.push(Range {
                unit: order[index],
                start: read - self.bounds[index],
                rows: taken,
            });
            (next, left) = (next + taken, left - taken);
        }
        Some(ranges)
    }
}

/// Scrambles a number (the finish of SplitMix64).
fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

const ROUNDS: usize = 6;

/// A permutation of the numbers below `size`, computed and not stored: a Feistel network over a rectangle that holds
/// them, and numbers that fall outside go through it again.
#[derive(Clone, Debug)]
pub(crate) struct Permutation {
    size: u64,
    width: u64,
    height: u64,
    keys: [u64; ROUNDS],
}

impl Permutation {
    pub(crate) fn new(size: u64, key: u64) -> Self {
        let width = size.isqrt().max(1);
        let height = size.div_ceil(width).max(1);
        let mut state = key;
        let keys = std::array::from_fn(|_| {
            state = mix(state);
            state
        });
        Self { size, width, height, keys }
    }

    pub(crate) fn at(&self, number: u64) -> u64 {
        let mut number = number;
        loop {
            let (mut left, mut right) = (number / self.height, number % self.height);
            for (round, &key) in self.keys.iter().enumerate() {
                match round % 2 {
                    0 => left = shift(left, right ^ key, self.width),
                    _ => right = shift(right, left ^ key, self.height),
                }
            }
            number = left * self.height + right;
            if number < self.size {
                return number;
            }
        }
    }
}

/// `number` moved around a circle of `size` by an amount that `by` decides.
fn shift(number: u64, by: u64, size: u64) -> u64 {
    // Half of `mix` is enough, because keys are mixed, and the highest bits, which are the best, decide.
    let by = by.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let by = (by ^ (by >> 32)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let amount = ((u128::from(by) * u128::from(size)) >> 64) as u64;
    let moved = number + amount;
    if moved >= size { moved - size } else { moved }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_order() -> impl Strategy<Value = Order> {
        let shuffle = prop_oneof![
            Just(Shuffle::None),
            Just(Shuffle::Full),
            (1_u64..50).prop_map(Shuffle::Buffer)
        ];
        let rest = prop_oneof![Just(Rest::Drop), Just(Rest::Pad)];
        (1_u64..9, 1_u64..20, shuffle, rest, any::<u64>()).prop_map(
            |(ranks, batch, shuffle, rest, seed)| Order { ranks, batch, shuffle, rest, seed },
        )
    }

    fn seen(plan: &Plan, epoch: u64) -> Vec<Vec<u64>> {
        let shares = (0..plan.order.ranks).map(|rank| plan.share(rank, epoch).unwrap());
        shares
            .map(|share| (0..share.count()).map(|position| share.row(position)).collect())
            .collect()
    }

    proptest! {
        #[test]
        fn a_permutation_has_every_number_once(size in 1_u64..2000, key in any::<u64>()) {
            let permutation = Permutation::new(size, key);
            let mut found: Vec<u64> = (0..size).map(|number| permutation.at(number)).collect();
            found.sort_unstable();
            prop_assert_eq!(found, (0..size).collect::<Vec<_>>());
        }

        #[test]
        fn ranks_have_equal_steps_and_each_row_as_often_as_stated(
            units in prop::collection::vec(0_u64..70, 1..6), order in any_order(), epoch in 0_u64..3,
        ) {
            let rows: u64 = units.iter().sum();
            let Ok(plan) = Plan::new(&units, order) else {
                prop_assert!(rows == 0 || (order.rest == Rest::Drop && rows < order.ranks * order.batch));
                return Ok(());
            };
            let seen = seen(&plan, epoch);
            let whole = plan.steps() * order.batch;
            prop_assert!(seen.iter().all(|rows| rows.len() as u64 == whole));
            let mut times = vec![0; rows as usize];
            seen.iter().flatten().for_each(|&row| times[row as usize] += 1);
            let (least, most) = (times.iter().min().unwrap(), times.iter().max().unwrap());
            prop_assert!(most - least <= 1, "rows are seen {} to {} times", least, most);
            match order.rest {
                Rest::Drop => {
                    prop_assert_eq!(*most, 1);
                    prop_assert!(rows - whole * order.ranks < order.ranks * order.batch);
                }
                Rest::Pad => prop_assert!(*least >= 1),
            }
        }

        #[test]
        fn what_is_read_is_what_is_seen(
            units in prop::collection::vec(0_u64..70, 1..6), order in any_order(), from in 0_u64..5,
        ) {
            let Ok(plan) = Plan::new(&units, order) else { return Ok(()) };
            for rank in 0..order.ranks {
                let share = plan.share(rank, 1).unwrap();
                let from = from.min((share.count() - 1) / share.window()) * share.window();
                let Some(ranges) = share.ranges(from) else { continue };
                let starts = starts(units.iter().copied());
                let read = ranges.iter().flat_map(|range| {
                    let first = starts[range.unit] + range.start;
                    first..first + range.rows
                });
                let read: Vec<u64> = read.collect();
                let mut seen: Vec<u64> = (from..share.count()).map(|position| share.row(position)).collect();
                prop_assert_eq!(read.len(), seen.len());
                let window = share.window() as usize;
                for (read, seen) in read.chunks(window).zip(seen.chunks_mut(window)) {
                    if order.shuffle == Shuffle::None {
                        prop_assert_eq!(read, &*seen);
                    }
                    let mut read = read.to_vec();
                    read.sort_unstable();
                    seen.sort_unstable();
                    prop_assert_eq!(&*read, &*seen);
                }
            }
        }

        #[test]
        fn a_full_shuffle_is_one_order_for_any_number_of_ranks(
            rows in 1_u64..500, batch in 1_u64..6, seed in any::<u64>(), epoch in 0_u64..3,
        ) {
            let global = |ranks: u64| {
                let order = Order { ranks, batch: 12 / ranks * batch, shuffle: Shuffle::Full, rest: Rest::Pad, seed };
                let plan = Plan::new(&[rows], order).unwrap();
                let seen = seen(&plan, epoch);
                let step = |step: usize| seen.iter().flat_map(move |rows| {
                    let batch = order.batch as usize;
                    rows[step * batch..(step + 1) * batch].to_vec()
                }).collect::<Vec<_>>();
                (0..plan.steps() as usize).flat_map(step).collect::<Vec<_>>()
            };
            let alone = global(1);
            for ranks in [2, 3, 4, 6, 12] {
                prop_assert_eq!(&alone, &global(ranks));
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ_and_repeat() {
        for shuffle in [Shuffle::Full, Shuffle::Buffer(100)] {
            let order = |seed| Order { ranks: 2, batch: 10, shuffle, rest: Rest::Drop, seed };
            let plan = |seed| Plan::new(&[300, 300, 300], order(seed)).unwrap();
            assert_eq!(seen(&plan(1), 0), seen(&plan(1), 0));
            assert_ne!(seen(&plan(1), 0), seen(&plan(1), 1));
            assert_ne!(seen(&plan(1), 0), seen(&plan(2), 0));
        }
    }

    #[test]
    fn a_permutation_is_even_over_places() {
        // Where number 0 goes, over many keys: every place about equally often.
        let (size, keys) = (16, 32_000);
        let mut times = vec![0_u32; size as usize];
        for key in 0..keys {
            times[Permutation::new(size, mix(key)).at(0) as usize] += 1;
        }
        assert!(times.iter().all(|&times| (1_800..2_200).contains(&times)), "{times:?}");
    }

    #[test]
    fn what_cannot_be_planned_says_what_to_do() {
        let order = Order { ranks: 4, batch: 8, shuffle: Shuffle::Full, rest: Rest::Drop, seed: 0 };
        let error = Plan::new(&[31], order).unwrap_err().to_string();
        assert_eq!(
            error,
            "31 rows do not fill one step of 4 ranks with 8 rows each: take a smaller batch_size, or rest=\"pad\""
        );
        assert!(Plan::new(&[], order).unwrap_err().to_string().contains("no rows"));
        assert_eq!(Plan::new(&[31], Order { rest: Rest::Pad, ..order }).unwrap().steps(), 1);
    }
}
