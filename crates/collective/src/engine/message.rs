//! What ranks tell the coordinator, and what it decides: the words between engines.
//!
//! Messages travel as frames of a length and postcard's bytes, on links between members that have proved who they
//! are. A length is checked against its bound before anything is kept for it.

use crate::{
    DType, Reduction,
    call::{Kind, disagreement},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{fmt, io};

/// Longest frame: names and shapes, never elements; or one rank's share of a timeline.
const MAX_FRAME: usize = 16 << 20;
/// Longest name of an operation.
pub(crate) const MAX_NAME: usize = 1024;

/// The size of a tensor in each dimension.
///
/// ```
/// use deuteron_collective::Shape;
/// let image = Shape::new(&[3, 224, 224]);
/// assert_eq!(image.count(), 150_528);
/// assert_eq!(image.to_string(), "[3, 224, 224]");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shape {
    dimensions: u8,
    sizes: [u64; Self::MOST],
}

impl Shape {
    /// Dimensions that are told apart; what lies beyond is multiplied into the last.
    const MOST: usize = 7;

    /// From the size of each dimension; none for a single element.
    pub fn new(sizes: &[usize]) -> Self {
        let mut shape =
            Self { dimensions: sizes.len().min(Self::MOST) as u8, sizes: [1; Self::MOST] };
        for (index, size) in sizes.iter().enumerate() {
            let slot = &mut shape.sizes[index.min(Self::MOST - 1)];
            *slot = slot.saturating_mul(*size as u64);
        }
        shape
    }

    /// Elements of a tensor of this shape.
    pub fn count(&self) -> usize {
        self.sizes.iter().fold(1u64, |all, size| all.saturating_mul(*size)) as usize
    }

    /// Of each dimension.
    pub(super) fn sizes(&self) -> &[u64] {
        &self.sizes[..usize::from(self.dimensions)]
    }

    /// Size of the first dimension, which ranks may share out.
    pub fn rows(&self) -> usize {
        self.sizes[0] as usize
    }

    /// Elements of one row.
    pub fn row(&self) -> usize {
        self.sizes[1..].iter().fold(1u64, |all, size| all.saturating_mul(*size)) as usize
    }

    /// Whether only the number of rows may differ.
    fn has_rows_like(&self, other: &Self) -> bool {
        self.dimensions == other.dimensions && self.sizes[1..] == other.sizes[1..]
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes: Vec<String> =
            self.sizes[..usize::from(self.dimensions)].iter().map(u64::to_string).collect();
        write!(f, "[{}]", sizes.join(", "))
    }
}

/// One tensor of an operation, as others have to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tensor {
    pub dtype: DType,
    pub shape: Shape,
}

impl Tensor {
    pub fn bytes(&self) -> usize {
        self.shape.count() * self.dtype.size()
    }
}

/// What a rank asks for under a name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Request {
    pub kind: Kind,
    pub reduction: Reduction,
    pub root: u32,
    pub tensors: Vec<Tensor>,
}

impl Request {
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(Tensor::bytes).sum()
    }

    /// Whether ranks that ask for these two can be served together.
    pub fn agrees(&self, other: &Self) -> bool {
        let same = |one: &Tensor, other: &Tensor| {
            one.dtype == other.dtype
                && match self.kind {
                    Kind::AllGather | Kind::AllToAll => one.shape.has_rows_like(&other.shape),
                    _ => one.shape == other.shape,
                }
        };
        let tensors = self.tensors.iter().zip(&other.tensors);
        self.kind == other.kind
            && self.root == other.root
            && (!self.reduces() || self.reduction == other.reduction)
            && self.tensors.len() == other.tensors.len()
            && tensors.into_iter().all(|(one, other)| same(one, other))
    }

    fn reduces(&self) -> bool {
        matches!(self.kind, Kind::AllReduce | Kind::ReduceScatter)
    }

    /// What may go into one bucket together: the same in all of its tensors, if there is such a thing.
    pub fn fuses_as(&self) -> Option<(DType, Reduction)> {
        let first = self.tensors.first()?;
        let alike = self.tensors.iter().all(|tensor| tensor.dtype == first.dtype);
        (self.kind == Kind::AllReduce && alike).then_some((first.dtype, self.reduction))
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensors: Vec<String> = self
            .tensors
            .iter()
            .take(4)
            .map(|tensor| format!("{} {}", tensor.dtype.name(), tensor.shape))
            .collect();
        write!(f, "{}({}", self.kind.name(), tensors.join(", "))?;
        if self.tensors.len() > tensors.len() {
            write!(f, " and {} more", self.tensors.len() - tensors.len())?;
        }
        match self.kind {
            Kind::Broadcast => write!(f, ", root {})", self.root),
            _ if self.reduces() => write!(f, ", {})", self.reduction),
            _ => f.write_str(")"),
        }
    }
}

/// Who differs, in words.
pub(crate) fn differing<'a>(requests: impl Iterator<Item = (usize, &'a Request)>) -> String {
    let mut said: Vec<(usize, String)> =
        requests.map(|(rank, request)| (rank, request.to_string())).collect();
    // The same words whoever came first.
    said.sort_by_key(|(rank, _)| *rank);
    disagreement(&said)
}

/// From a rank to the coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Word {
    /// An operation is ready here. `once`: its name will not come again.
    Ready { name: String, request: Request, once: bool },
    /// The same as at its last run.
    Again(u32),
    /// Every member of a bucket is ready here.
    Full { bucket: u32, round: u64 },
    /// Somebody here waits for a bucket of which not all members come, or one has changed.
    Open { bucket: u32, round: u64 },
    /// This rank has no more data.
    Joined,
    /// A name was given a second time while its first operation was still on its way.
    Twice(String),
    /// What ranks wait for is wanted.
    Ask,
    /// The answer to [`Decision::Tell`].
    Doing { number: u32, doing: Doing },
    /// Start or stop the timeline.
    Timeline(bool),
    /// This rank's share of the timeline, and its clock when it was sent.
    Trace { events: Vec<Event>, clock: u64, more: bool },
}

/// What a rank is doing, and for how many milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Doing {
    pub what: String,
    pub milliseconds: u64,
}

/// One stretch of time in a timeline, in nanoseconds of its rank's clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Event {
    pub phase: Phase,
    /// The operation, or the bucket.
    pub name: String,
    pub start: u64,
    pub end: u64,
    pub bytes: u64,
    /// Operations that were carried out together.
    pub fused: u32,
}

/// What an operation spends its time with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// From its submission until all ranks had it.
    Negotiate,
    /// In the collective call, with copies in and out.
    Run,
    /// A user's thread slept until it was done.
    Wait,
}

/// What the coordinator decides; every rank carries it out in the same order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Decision {
    /// These together, in one reduction if there are several.
    Run(Vec<Item>),
    /// All members of a bucket.
    RunBucket(u32),
    /// It cannot be carried out, and why. The engine goes on.
    Refuse { name: String, reason: String },
    /// These operations, known by number, are one bucket from now on.
    Freeze { bucket: u32, members: Vec<u32> },
    /// The bucket is no more.
    Thaw(u32),
    /// Every rank has joined; this one was the last.
    AllJoined(u32),
    /// Tell what you are doing.
    Tell(u32),
    /// What ranks wait for.
    Report(String),
    /// Record the timeline, or stop and send the rest.
    Timeline(bool),
}

/// One operation of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Item {
    /// By its number.
    Known(u32),
    /// By its name, which has a number from now on if it may come again.
    New { number: Option<u32>, name: String, request: Request },
}

/// Appends a message as a frame.
pub(crate) fn encode(message: &impl Serialize, bytes: &mut Vec<u8>) -> io::Result<()> {
    let start = bytes.len();
    bytes.extend([0; 4]);
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
    let taken = postcard::to_extend(message, std::mem::take(bytes)).map_err(invalid)?;
    *bytes = taken;
    let length = bytes.len() - start - 4;
    if length > MAX_FRAME {
        return Err(too_long(length));
    }
    bytes[start..start + 4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(())
}

fn too_long(length: usize) -> io::Error {
    let text = format!("a message of {length} bytes is over the bound of {MAX_FRAME}");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// The message at the start of `bytes` and its length, or `None` while it is not whole.
pub(crate) fn decode<M: DeserializeOwned>(bytes: &[u8]) -> io::Result<Option<(M, usize)>> {
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > MAX_FRAME {
        return Err(too_long(length));
    }
    let Some(body) = rest.get(..length) else { return Ok(None) };
    let message = postcard::from_bytes(body)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok(Some((message, 4 + length)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;
    use proptest::prelude::*;

    fn word() -> Word {
        let tensor = Tensor { dtype: DType::F32, shape: Shape::new(&[3, 4]) };
        let request = Request {
            kind: Kind::AllReduce,
            reduction: Reduction::from(ReduceOp::Mean).prescale(0.5),
            root: 0,
            tensors: vec![tensor; 2],
        };
        Word::Ready { name: "layer1.weight".into(), request, once: false }
    }

    #[test]
    fn words_arrive_one_after_the_other_or_not_yet() {
        let mut bytes = Vec::new();
        encode(&word(), &mut bytes).unwrap();
        let first = bytes.len();
        encode(&Word::Again(7), &mut bytes).unwrap();
        assert_eq!(decode::<Word>(&bytes).unwrap(), Some((word(), first)));
        let (second, length) = decode::<Word>(&bytes[first..]).unwrap().unwrap();
        assert_eq!((second, first + length), (Word::Again(7), bytes.len()));
        for cut in 0..first {
            assert_eq!(decode::<Word>(&bytes[..cut]).unwrap(), None, "{cut} bytes");
        }
    }

    #[test]
    fn lengths_are_bounded_before_anything_is_kept() {
        let error = decode::<Word>(&u32::MAX.to_le_bytes()).unwrap_err();
        assert!(error.to_string().contains("over the bound"), "{error}");
    }

    #[test]
    fn shapes_beyond_seven_dimensions_keep_their_count() {
        let shape = Shape::new(&[2, 1, 1, 1, 1, 1, 3, 5, 7]);
        assert_eq!((shape.count(), shape.rows(), shape.row()), (210, 2, 105));
        assert_eq!(Shape::new(&[]).count(), 1);
        assert_eq!(Shape::new(&[0, 4]).count(), 0);
    }

    proptest! {
        #[test]
        fn whatever_comes_is_a_message_or_an_error(mut bytes in prop::collection::vec(any::<u8>(), 4..200)) {
            let length = (bytes.len() - 4) as u32;
            bytes[..4].copy_from_slice(&length.to_le_bytes());
            let _ = decode::<Word>(&bytes);
            let _ = decode::<Decision>(&bytes);
        }
    }
}
