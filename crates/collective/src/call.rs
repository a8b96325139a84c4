//! One collective call as all ranks must agree on it.

use crate::{DType, ReduceOp, Reduction};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Which operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Kind {
    /// Every rank gets the combination of all ranks' elements.
    AllReduce = 0,
    /// Every rank gets all ranks' elements in rank order.
    AllGather = 1,
    /// The same, with as many elements from each rank as it has.
    AllGatherVaried = 2,
    /// Every rank gets the root's elements.
    Broadcast = 3,
    /// Nobody leaves before all have come.
    Barrier = 4,
    /// Memory of the group is made.
    Bucket = 5,
    /// Every rank gets its part of the combination of all ranks' elements.
    ReduceScatter = 6,
    /// Every rank gets its part of every rank's elements.
    AllToAll = 7,
    /// As the reduce-scatter, with parts of different lengths.
    ReduceScatterVaried = 8,
    /// As the all-to-all, with as many elements for each rank as it is given.
    AllToAllVaried = 9,
    /// One rank's elements go to another.
    Send = 10,
    /// One rank's elements come from another.
    Receive = 11,
    /// Groups of some of the ranks are made.
    Subgroup = 12,
}

impl Kind {
    pub(crate) const ALL: [Self; 13] = [
        Self::AllReduce,
        Self::AllGather,
        Self::AllGatherVaried,
        Self::Broadcast,
        Self::Barrier,
        Self::Bucket,
        Self::ReduceScatter,
        Self::AllToAll,
        Self::ReduceScatterVaried,
        Self::AllToAllVaried,
        Self::Send,
        Self::Receive,
        Self::Subgroup,
    ];

    /// The name users write.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::AllGatherVaried => "all_gather_varied",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::Bucket => "bucket",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::ReduceScatterVaried => "reduce_scatter_varied",
            Self::AllToAllVaried => "all_to_all_varied",
            Self::Send => "send",
            Self::Receive => "receive",
            Self::Subgroup => "subgroup",
        }
    }
}

/// Everything about a call that has to be the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Call {
    pub kind: Kind,
    pub dtype: DType,
    pub reduction: Reduction,
    /// The root, the other rank of a pair, or the fingerprint of the parts' lengths.
    pub root: usize,
    /// Elements of one rank; of all ranks together where their numbers differ.
    pub count: usize,
}

/// A call in four words, as it stands in shared memory and in frames.
pub(crate) type CallWords = [u64; 4];

impl Call {
    pub fn new(kind: Kind, dtype: DType, count: usize) -> Self {
        Self { kind, dtype, reduction: ReduceOp::Sum.into(), root: 0, count }
    }

    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    pub fn words(&self) -> CallWords {
        [
            self.kind as u64
                | (self.dtype as u64) << 8
                | (self.reduction.op as u64) << 16
                | (self.root as u64) << 32,
            self.count as u64,
            self.reduction.prescale.to_bits(),
            self.reduction.postscale.to_bits(),
        ]
    }

    /// The call behind the words, if they are one: they may come from anywhere.
    pub fn from_words([first, count, prescale, postscale]: CallWords) -> Option<Self> {
        let [kind, dtype, op, reserved, root @ ..] = first.to_le_bytes();
        if reserved != 0 {
            return None;
        }
        let reduction = Reduction {
            op: ReduceOp::from_code(op)?,
            prescale: f64::from_bits(prescale),
            postscale: f64::from_bits(postscale),
        };
        Some(Self {
            kind: *Kind::ALL.get(usize::from(kind))?,
            dtype: DType::from_code(dtype)?,
            reduction,
            root: u32::from_le_bytes(root) as usize,
            count: usize::try_from(count).ok()?,
        })
    }

    /// A fingerprint that differs when the words do, but for one case in 2⁶⁴.
    pub fn signature(&self) -> u64 {
        fingerprint(self.words())
    }
}

fn fingerprint(words: impl IntoIterator<Item = u64>) -> u64 {
    words.into_iter().fold(0x9e37_79b9_7f4a_7c15, |hash, word| {
        let mixed = (hash ^ word).wrapping_mul(0xd6e8_feb8_6659_fd93);
        mixed ^ (mixed >> 32)
    })
}

/// A fingerprint of lengths that fits where a root does.
pub(crate) fn fingerprint_of(counts: &[usize]) -> usize {
    fingerprint(counts.iter().map(|count| *count as u64)) as u32 as usize
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, dtype, count) = (self.kind.name(), self.dtype.name(), self.count);
        match self.kind {
            Kind::Barrier | Kind::Subgroup => write!(f, "{name}()"),
            Kind::AllReduce | Kind::ReduceScatter => {
                write!(f, "{name}({dtype} × {count}, {})", self.reduction)
            }
            Kind::ReduceScatterVaried => {
                let (reduction, counts) = (self.reduction, self.root);
                write!(f, "{name}({dtype} × {count}, {reduction}, counts #{counts:08x})")
            }
            Kind::Broadcast => write!(f, "{name}({dtype} × {count}, root {})", self.root),
            Kind::Send => write!(f, "{name}({dtype} × {count}, to {})", self.root),
            Kind::Receive => write!(f, "{name}({dtype} × {count}, from {})", self.root),
            _ => write!(f, "{name}({dtype} × {count})"),
        }
    }
}

/// Says who differs: ranks are put together by what they called, the largest party first.
pub(crate) fn disagreement(calls: &[(usize, String)]) -> String {
    let mut parties: Vec<(&str, Vec<usize>)> = Vec::new();
    for (rank, call) in calls {
        match parties.iter_mut().find(|(known, _)| known == call) {
            Some((_, ranks)) => ranks.push(*rank),
            None => parties.push((call, vec![*rank])),
        }
    }
    parties.sort_by_key(|(_, ranks)| std::cmp::Reverse(ranks.len()));
    let said: Vec<String> = parties
        .iter()
        .map(|(call, ranks)| {
            let word = if ranks.len() == 1 { "rank" } else { "ranks" };
            let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
            format!("{word} {} called {call}", ranks.join(", "))
        })
        .collect();
    said.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_the_call() {
        let call = Call {
            reduction: Reduction::from(ReduceOp::Mean).prescale(0.5),
            root: 3,
            ..Call::new(Kind::AllReduce, DType::Bf16, 1 << 40)
        };
        assert_eq!(Call::from_words(call.words()), Some(call));
        assert_eq!(call.to_string(), "all_reduce(bf16 × 1099511627776, mean, prescale 0.5)");
        assert_ne!(call.signature(), Call { count: 7, ..call }.signature());
        assert_eq!(Call::from_words([u64::MAX; 4]), None);
    }

    #[test]
    fn the_odd_one_out_is_named_last() {
        let calls = [(0, "barrier()".into()), (1, "x".into()), (2, "barrier()".into())];
        assert_eq!(disagreement(&calls), "ranks 0, 2 called barrier(); rank 1 called x");
    }
}
