//! Element types: what a tensor's memory is made of.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The type of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum DType {
    /// One byte, zero or one.
    Bool = 0,
    /// Unsigned 8-bit integer.
    U8 = 1,
    /// Signed 8-bit integer.
    I8 = 2,
    /// Signed 16-bit integer.
    I16 = 3,
    /// Signed 32-bit integer.
    I32 = 4,
    /// Signed 64-bit integer.
    I64 = 5,
    /// IEEE half precision.
    F16 = 6,
    /// Brain float: the upper half of an `f32`.
    Bf16 = 7,
    /// IEEE single precision.
    F32 = 8,
    /// IEEE double precision.
    F64 = 9,
}

impl DType {
    /// Every type, in the order of its code on the wire.
    pub const ALL: [Self; 10] = [
        Self::Bool,
        Self::U8,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
    ];

    /// Bytes of one element.
    ///
    /// ```
    /// use deuteron_collective::DType;
    /// assert_eq!(DType::Bf16.size(), 2);
    /// ```
    pub const fn size(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 => 1,
            Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// The name users write.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

/// Evaluates an expression with a name standing for the Rust type of a [`DType`].
macro_rules! with_element {
    ($dtype:expr, $name:ident => $body:expr) => {
        match $dtype {
            $crate::DType::Bool => {
                type $name = bool;
                $body
            }
            $crate::DType::U8 => {
                type $name = u8;
                $body
            }
            $crate::DType::I8 => {
                type $name = i8;
                $body
            }
            $crate::DType::I16 => {
                type $name = i16;
                $body
            }
            $crate::DType::I32 => {
                type $name = i32;
                $body
            }
            $crate::DType::I64 => {
                type $name = i64;
                $body
            }
            $crate::DType::F16 => {
                type $name = half::f16;
                $body
            }
            $crate::DType::Bf16 => {
                type $name = half::bf16;
                $body
            }
            $crate::DType::F32 => {
                type $name = f32;
                $body
            }
            $crate::DType::F64 => {
                type $name = f64;
                $body
            }
        }
    };
}
pub(crate) use with_element;

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that can be exchanged.
///
/// Sealed: each implementor is plain memory, and every bit pattern a kernel writes is valid for it.
pub trait Element: Copy + Send + Sync + 'static + sealed::Sealed {
    /// Its type code.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($rust:ty => $code:ident),+ $(,)?) => {$(
        impl sealed::Sealed for $rust {}
        impl Element for $rust {
            const DTYPE: DType = DType::$code;
        }
    )+};
}

elements! {
    bool => Bool, u8 => U8, i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    f16 => F16, bf16 => Bf16, f32 => F32, f64 => F64,
}
