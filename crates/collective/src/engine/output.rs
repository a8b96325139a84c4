//! Results that are new memory: what ranks have gathered or been given.

use crate::{
    DType, Element, Gathered,
    error::{Error, Result},
};
use std::{any::Any, fmt};

/// Elements that an operation has made, of a type that is known at run time.
pub struct Output {
    dtype: DType,
    data: *const u8,
    len: usize,
    counts: Vec<usize>,
    values: Box<dyn Any + Send>,
}

#[expect(unsafe_code, reason = "the pointer is into `values`")]
// SAFETY: the pointer is into `values`, which is Send, and only read.
unsafe impl Send for Output {}

impl Output {
    pub(super) fn new<T: Element>(gathered: Gathered<T>) -> Self {
        let Gathered { values, counts } = gathered;
        let (data, len) = (values.as_ptr().cast(), values.len());
        Self { dtype: T::DTYPE, data, len, counts, values: Box::new(values) }
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The first element; valid for as long as this lives.
    pub fn data(&self) -> *const u8 {
        self.data
    }

    /// How many elements there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many elements are of each rank.
    pub fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// The elements as what they are.
    pub fn into_gathered<T: Element>(self) -> Result<Gathered<T>> {
        let (dtype, counts) = (self.dtype, self.counts);
        match self.values.downcast::<Vec<T>>() {
            Ok(values) => Ok(Gathered { values: *values, counts }),
            Err(_) => Err(Error::Invalid(format!(
                "the elements are {}, not {}",
                dtype.name(),
                T::DTYPE.name()
            ))),
        }
    }
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Output({} × {})", self.dtype.name(), self.len)
    }
}
