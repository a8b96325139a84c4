//! What every call has to compute, element by element, in rank order, without any of the crate's arithmetic.

use deuteron_collective::{Element, ReduceOp, Reduction};
use half::{bf16, f16};
use std::fmt::Debug;

/// Runs a block with a type's name standing for the Rust type of a [`deuteron_collective::DType`].
macro_rules! with_type {
    ($dtype:expr, $name:ident => $body:expr) => {{
        use deuteron_collective::DType;
        match $dtype {
            DType::Bool => {
                type $name = bool;
                $body
            }
            DType::U8 => {
                type $name = u8;
                $body
            }
            DType::I8 => {
                type $name = i8;
                $body
            }
            DType::I16 => {
                type $name = i16;
                $body
            }
            DType::I32 => {
                type $name = i32;
                $body
            }
            DType::I64 => {
                type $name = i64;
                $body
            }
            DType::F16 => {
                type $name = half::f16;
                $body
            }
            DType::Bf16 => {
                type $name = half::bf16;
                $body
            }
            DType::F32 => {
                type $name = f32;
                $body
            }
            DType::F64 => {
                type $name = f64;
                $body
            }
        }
    }};
}
pub(crate) use with_type;

/// What the values of a test are like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Style {
    /// Floats of which every sum and product of a few is exact, so that the order does not show. Any integers.
    Exact,
    /// Floats that have to be rounded.
    Rough,
    /// NaNs, infinities and zeros of both signs, besides one.
    Special,
}

/// A type of elements with values for tests and the sequential reference.
pub trait Sample: Element + Default + Debug {
    /// The value that stands for a random number.
    fn sample(random: u64, style: Style, op: ReduceOp) -> Self;

    fn bits(self) -> u64;

    /// All ranks' values of one element combined in rank order: halves in `f32`, rounded once.
    fn reduce(values: &[Self], reduction: Reduction) -> Self;

    /// Whether `result` is right where each step of the way was rounded to the type itself, in any order.
    fn is_near(result: Self, values: &[Self], reduction: Reduction) -> bool {
        result.bits() == Self::reduce(values, reduction).bits()
    }
}

/// A good random number for a place: rank and index count, and the seed of the step.
pub fn scatter(seed: u64, rank: usize, index: usize) -> u64 {
    let mut mixed =
        seed ^ (rank as u64 + 1) << 48 ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for _ in 0..2 {
        mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    }
    mixed ^ mixed >> 32
}

/// What rank `rank` brings along.
pub fn input<T: Sample>(
    seed: u64,
    rank: usize,
    count: usize,
    style: Style,
    op: ReduceOp,
) -> impl Iterator<Item = T> {
    (0..count).map(move |index| T::sample(scatter(seed, rank, index), style, op))
}

/// The bits of many elements in one word.
pub fn digest<T: Sample>(values: &[T]) -> u64 {
    values.iter().fold(values.len() as u64, |hash, value| {
        let mixed = (hash ^ value.bits()).wrapping_mul(0xd6e8_feb8_6659_fd93);
        mixed ^ mixed >> 32
    })
}

impl Sample for bool {
    fn sample(random: u64, _: Style, op: ReduceOp) -> Self {
        // Mostly the value that one other value decides about.
        let rare = random.is_multiple_of(8);
        if matches!(op, ReduceOp::Sum | ReduceOp::Max) { rare } else { !rare }
    }

    fn bits(self) -> u64 {
        u64::from(self)
    }

    /// As the integers 0 and 1, that are true unless they come out as 0.
    fn reduce(values: &[Self], reduction: Reduction) -> Self {
        let scaled = |value: bool, factor: f64| value && factor as u8 != 0;
        let mut values = values.iter().map(|value| scaled(*value, reduction.prescale));
        let combined = match reduction.op {
            ReduceOp::Sum | ReduceOp::Max => values.any(|value| value),
            ReduceOp::Mean | ReduceOp::Min | ReduceOp::Product => values.all(|value| value),
        };
        scaled(combined, reduction.postscale)
    }
}

macro_rules! integers {
    ($($integer:ident)+) => {$(
        impl Sample for $integer {
            fn sample(random: u64, _: Style, _: ReduceOp) -> Self {
                // Small ones now and then: a product of large ones is soon zero.
                if random % 3 == 0 { (random >> 8) as Self } else { (random >> 8) as Self % 5 }
            }

            fn bits(self) -> u64 {
                self as u64
            }

            fn reduce(values: &[Self], reduction: Reduction) -> Self {
                let scaled = |value: Self, factor: f64| match factor {
                    1.0 => value,
                    _ => (value as f64 * factor) as Self,
                };
                let ranks = values.len() as Self;
                let combined = values
                    .iter()
                    .map(|value| scaled(*value, reduction.prescale))
                    .reduce(|one, other| match reduction.op {
                        ReduceOp::Sum | ReduceOp::Mean => one.wrapping_add(other),
                        ReduceOp::Min => one.min(other),
                        ReduceOp::Max => one.max(other),
                        ReduceOp::Product => one.wrapping_mul(other),
                    })
                    .unwrap();
                let divided = if reduction.op == ReduceOp::Mean { combined / ranks } else { combined };
                scaled(divided, reduction.postscale)
            }
        }
    )+};
}

integers!(u8 i8 i16 i32 i64);

/// A float of moderate size with every bit of its significand in use.
fn rough(random: u64, op: ReduceOp) -> f64 {
    let significand = 1.0 + (random >> 12) as f64 / (1u64 << 52) as f64;
    let exponent = if op == ReduceOp::Product { -1 } else { (random >> 3) as i32 % 13 - 6 };
    let sign = if random & 1 == 0 { 1.0 } else { -1.0 };
    sign * significand * f64::powi(2.0, exponent)
}

fn exact(random: u64, op: ReduceOp) -> f64 {
    match op {
        ReduceOp::Product => [1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 1.0, -1.0][random as usize % 8],
        _ => (random % 17) as f64 - 8.0,
    }
}

/// How often one element is rounded that is combined over links, its exact value, and the size that each rounding
/// is relative to. `start` and `finish` say how often scaling rounds.
fn rounded(values: &[f64], reduction: Reduction, start: usize, finish: usize) -> (i32, f64, f64) {
    let scaled = values.iter().map(|value| value * reduction.prescale);
    let (total, size) = match reduction.op {
        ReduceOp::Sum | ReduceOp::Mean => {
            (scaled.clone().sum::<f64>(), scaled.map(f64::abs).sum::<f64>())
        }
        ReduceOp::Product => {
            (scaled.clone().product::<f64>(), scaled.map(f64::abs).product::<f64>())
        }
        ReduceOp::Min => (scaled.clone().fold(f64::INFINITY, f64::min), f64::NAN),
        ReduceOp::Max => (scaled.clone().fold(f64::NEG_INFINITY, f64::max), f64::NAN),
    };
    let size = if size.is_nan() { total.abs() } else { size };
    let mean = reduction.op == ReduceOp::Mean;
    let factor = reduction.postscale / if mean { values.len() as f64 } else { 1.0 };
    let hops = values.len() - 1;
    // The errors of all inputs multiply in a product; in a sum they are relative to the same whole.
    let inputs = if reduction.op == ReduceOp::Product { values.len() } else { 1 };
    let scales = if reduction.prescale != 1.0 { start * inputs } else { 0 };
    let finishes = if mean || reduction.postscale != 1.0 { finish } else { 0 };
    ((hops + scales + finishes) as i32, total * factor, size * factor.abs())
}

macro_rules! floats {
    ($($float:ident in $wide:ident, unit $unit:expr, tiny $tiny:expr, start $start:expr, finish $finish:expr;)+) => {$(
        impl Sample for $float {
            fn sample(random: u64, style: Style, op: ReduceOp) -> Self {
                let narrow = |value: f64| <$float as Narrow<$wide>>::narrow(value as $wide);
                match style {
                    Style::Exact => narrow(exact(random, op)),
                    Style::Rough => narrow(rough(random, op)),
                    Style::Special => match random % 16 {
                        // A payload and a sign that must not show.
                        0 => Self::from_bits(Self::NAN.to_bits() | 0x15),
                        1 => -Self::from_bits(Self::NAN.to_bits() | 0x2a),
                        2 => Self::INFINITY,
                        3 => Self::NEG_INFINITY,
                        4..8 => narrow(-0.0),
                        8..12 => narrow(0.0),
                        12..14 => narrow(1.0),
                        _ => narrow(-1.0),
                    },
                }
            }

            fn bits(self) -> u64 {
                u64::from(self.to_bits())
            }

            fn reduce(values: &[Self], reduction: Reduction) -> Self {
                let scaled = |value: $wide, factor: f64| match factor {
                    1.0 => value,
                    _ => value * factor as $wide,
                };
                // Equal zeros are ordered by their signs, and a NaN wins.
                let below = |one: $wide, other: $wide| {
                    one < other || (one == other && one.is_sign_negative())
                };
                let combined = values
                    .iter()
                    .map(|value| scaled($wide::from(*value), reduction.prescale))
                    .reduce(|one, other| match reduction.op {
                        ReduceOp::Sum | ReduceOp::Mean => one + other,
                        ReduceOp::Product => one * other,
                        _ if one.is_nan() || other.is_nan() => $wide::NAN,
                        ReduceOp::Min => if below(one, other) { one } else { other },
                        ReduceOp::Max => if below(one, other) { other } else { one },
                    })
                    .unwrap();
                let divided = match reduction.op {
                    ReduceOp::Mean => combined / values.len() as $wide,
                    _ => combined,
                };
                let result = scaled(divided, reduction.postscale);
                if result.is_nan() { Self::NAN } else { <$float as Narrow<$wide>>::narrow(result) }
            }

            /// Within one rounding to the type for each of the n - 1 hops, one for a prescale and those of the
            /// end, relative to the sum of magnitudes.
            fn is_near(result: Self, values: &[Self], reduction: Reduction) -> bool {
                let wide: Vec<f64> = values.iter().map(|value| f64::from(*value)).collect();
                let (roundings, total, size) = rounded(&wide, reduction, $start, $finish);
                let growth = (1.0 + $unit * (1.0 + 1e-3)).powi(roundings) - 1.0;
                // The reference is rounded too.
                let own = 16.0 * f64::EPSILON * size;
                let difference = (f64::from(result) - total).abs();
                let tiny = f64::from(roundings) * $tiny * (1.0 + reduction.postscale.abs());
                difference <= growth * size + tiny + own
            }
        }
    )+};
}

// A factor is rounded to `f32` before it is used, which is nothing for halves.
floats! {
    f16 in f32, unit 2f64.powi(-11), tiny 2f64.powi(-25), start 1, finish 1;
    bf16 in f32, unit 2f64.powi(-8), tiny 0.0, start 1, finish 1;
    f32 in f32, unit 2f64.powi(-24), tiny 0.0, start 2, finish 3;
    f64 in f64, unit 2f64.powi(-53), tiny 0.0, start 1, finish 2;
}

/// Rounds to nearest, ties to even.
trait Narrow<W> {
    fn narrow(wide: W) -> Self;
}

impl Narrow<f32> for f16 {
    fn narrow(wide: f32) -> Self {
        Self::from_f32(wide)
    }
}

impl Narrow<f32> for bf16 {
    fn narrow(wide: f32) -> Self {
        Self::from_f32(wide)
    }
}

impl Narrow<Self> for f32 {
    fn narrow(wide: Self) -> Self {
        wide
    }
}

impl Narrow<Self> for f64 {
    fn narrow(wide: Self) -> Self {
        wide
    }
}
