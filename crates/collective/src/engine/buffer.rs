//! Memory that an operation on its way may own.
#![expect(unsafe_code, reason = "operations on their way hold pointers to their tensors")]

use super::{Shape, table::RawTensor};
use crate::{Bucket, Element};

/// Memory of tensors that stays where it is when its owner is moved.
///
/// # Safety
/// The tensors that are handed out stay valid, and are not used by anybody else, until the buffer is dropped.
pub unsafe trait Buffer: Send + 'static {
    /// Type of its elements.
    type Element: Element;

    /// Calls `body` with the tensors.
    fn with_tensors<R>(&mut self, body: impl FnOnce(&[RawTensor]) -> R) -> R;
}

pub(super) fn raw<T: Element>(tensor: &mut [T]) -> RawTensor {
    RawTensor {
        data: tensor.as_mut_ptr().cast(),
        dtype: T::DTYPE,
        shape: Shape::new(&[tensor.len()]),
    }
}

// SAFETY: a vector's elements lie on the heap and are its own.
unsafe impl<T: Element> Buffer for Vec<T> {
    type Element = T;

    fn with_tensors<R>(&mut self, body: impl FnOnce(&[RawTensor]) -> R) -> R {
        body(&[raw(self)])
    }
}

// SAFETY: as above.
unsafe impl<T: Element> Buffer for Box<[T]> {
    type Element = T;

    fn with_tensors<R>(&mut self, body: impl FnOnce(&[RawTensor]) -> R) -> R {
        body(&[raw(self)])
    }
}

// SAFETY: a bucket's elements lie in its mapping, and no other bucket has the same.
unsafe impl<T: Element> Buffer for Bucket<T> {
    type Element = T;

    fn with_tensors<R>(&mut self, body: impl FnOnce(&[RawTensor]) -> R) -> R {
        body(&[raw(self)])
    }
}

/// Tensors that are done together: one operation, one handle.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Together<B>(pub Vec<B>);

// SAFETY: each of them is a buffer.
unsafe impl<B: Buffer> Buffer for Together<B> {
    type Element = B::Element;

    fn with_tensors<R>(&mut self, body: impl FnOnce(&[RawTensor]) -> R) -> R {
        let mut all = Vec::new();
        for buffer in &mut self.0 {
            buffer.with_tensors(|tensors| all.extend_from_slice(tensors));
        }
        body(&all)
    }
}
