//! Results that are new memory: what ranks have gathered or been given, and buckets.

use crate::{
    Bucket, DType, Element, Gathered,
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

    /// A bucket is a result too.
    pub(super) fn of<T: Element>(bucket: Bucket<T>) -> Self {
        let (data, len) = (bucket.as_ptr().cast(), bucket.len());
        Self { dtype: T::DTYPE, data, len, counts: Vec::new(), values: Box::new(bucket) }
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
    pub fn into_gathered<T: Element>(mut self) -> Result<Gathered<T>> {
        let counts = std::mem::take(&mut self.counts);
        self.into_inner::<T, _>().map(|values| Gathered { values, counts })
    }

    /// The bucket, if it is one.
    pub(super) fn into_bucket<T: Element>(self) -> Result<Bucket<T>> {
        self.into_inner::<T, _>()
    }

    fn into_inner<T: Element, V: 'static>(self) -> Result<V> {
        let (dtype, wanted) = (self.dtype.name(), T::DTYPE.name());
        let values = self.values.downcast().map(|values| *values);
        values.map_err(|_| Error::Invalid(format!("the elements are {dtype}, not {wanted}")))
    }
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Output({} × {})", self.dtype.name(), self.len)
    }
}
