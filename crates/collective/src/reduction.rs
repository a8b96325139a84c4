//! What a reduction computes: the operation and its scales.

use serde::{Deserialize, Serialize};
use std::fmt;

/// How elements of different ranks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum ReduceOp {
    /// Sum; logical or for `bool`; integers wrap.
    Sum = 0,
    /// Sum divided by the number of ranks; integers truncate towards zero; for `bool` true where all are.
    Mean = 1,
    /// Smallest; a NaN wins.
    Min = 2,
    /// Largest; a NaN wins.
    Max = 3,
    /// Product; integers wrap.
    Product = 4,
}

impl ReduceOp {
    /// Every operation, in the order of its code on the wire.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Mean, Self::Min, Self::Max, Self::Product];

    /// The name users write.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

/// An operation with factors applied to every input before it and to the result after it.
///
/// ```
/// use deuteron_collective::{ReduceOp, Reduction};
/// let halved = Reduction::from(ReduceOp::Sum).prescale(0.5);
/// assert_eq!(halved.op, ReduceOp::Sum);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reduction {
    /// How inputs are combined.
    pub op: ReduceOp,
    /// Factor on every rank's input. All ranks must pass the same.
    pub prescale: f64,
    /// Factor on the result. All ranks must pass the same.
    pub postscale: f64,
}

impl From<ReduceOp> for Reduction {
    fn from(op: ReduceOp) -> Self {
        Self { op, prescale: 1.0, postscale: 1.0 }
    }
}

impl Reduction {
    /// Multiplies every input by `factor` first.
    #[must_use]
    pub fn prescale(self, factor: f64) -> Self {
        Self { prescale: factor, ..self }
    }

    /// Multiplies the result by `factor` last.
    #[must_use]
    pub fn postscale(self, factor: f64) -> Self {
        Self { postscale: factor, ..self }
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.op.name())?;
        if self.prescale != 1.0 {
            write!(f, ", prescale {}", self.prescale)?;
        }
        if self.postscale != 1.0 {
            write!(f, ", postscale {}", self.postscale)?;
        }
        Ok(())
    }
}
