//! How elements are divided: chunk arithmetic without gaps, overlaps or overflow.

use std::ops::Range;

/// The `index`-th of `parts` nearly equal ranges of `count` elements. Boundaries fall on multiples of `grain`
/// wherever they can, so that ranks do not write into each other's cache lines.
pub(crate) fn part(count: usize, parts: usize, index: usize, grain: usize) -> Range<usize> {
    let grains = count.div_ceil(grain);
    let (each, rest) = (grains / parts, grains % parts);
    let start = |index: usize| ((index * each + index.min(rest)) * grain).min(count);
    start(index)..start(index + 1)
}

/// Elements that fill a cache line.
pub(crate) fn line_grain(element_size: usize) -> usize {
    64 / element_size
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_cover_everything_once_and_evenly(
            count in prop_oneof![0usize..300, 0usize..1 << 34],
            parts in 1usize..65,
            grain in 1usize..65,
        ) {
            let mut next = 0;
            for index in 0..parts {
                let range = part(count, parts, index, grain);
                prop_assert_eq!(range.start, next);
                prop_assert!(range.end == count || range.end.is_multiple_of(grain));
                prop_assert!(range.len() <= count / parts + 2 * grain);
                next = range.end;
            }
            prop_assert_eq!(next, count);
        }
    }
}
