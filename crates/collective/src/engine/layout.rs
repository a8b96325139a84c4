//! How the operations of a step that repeats are put into buckets: one pure function, with its reason.

use crate::{DType, Reduction, bucket::Location};

/// A gap in registered memory ends a bucket of at least this many bytes; smaller ones are copied together.
const WORTH: usize = 64 << 10;

/// An operation that comes in every step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    pub number: u32,
    pub fuses_as: (DType, Reduction),
    pub bytes: usize,
    /// Where its tensor lies on the lowest rank. Others may have it elsewhere, and copy.
    pub location: Location,
}

/// Operations that are carried out together.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Layout {
    /// In the order of their elements.
    pub members: Vec<u32>,
    pub reason: &'static str,
}

/// Puts the members of a step, in the order in which they became ready, into buckets of about `most` bytes.
pub(crate) fn layout(step: &[Member], most: usize) -> Vec<Layout> {
    let mut layouts = Vec::new();
    let mut kinds: Vec<(DType, Reduction)> = Vec::new();
    for member in step {
        if !kinds.contains(&member.fuses_as) {
            kinds.push(member.fuses_as);
        }
    }
    for kind in kinds {
        let alike = step.iter().filter(|member| member.fuses_as == kind);
        let (mut placed, mut loose): (Vec<Member>, Vec<Member>) =
            alike.partition(|member| member.location.is_registered());
        // Neighbours in memory belong together; the order of memory is that of the framework that laid them there.
        placed.sort_by_key(|member| member.location);
        for piece in placed
            .chunk_by(|one, next| one.location.is_followed_by(one.bytes as u64, next.location))
        {
            if bytes(piece) < WORTH && piece.len() < placed.len() {
                loose.extend(piece);
                continue;
            }
            let reason = "they lie side by side in registered memory: nothing is copied";
            layouts
                .extend(cut(piece, most).map(|bucket| Layout { members: numbers(bucket), reason }));
        }
        let reason = "they lie in memory of their own: copied together";
        layouts.extend(cut(&loose, most).map(|bucket| Layout { members: numbers(bucket), reason }));
    }
    layouts
}

fn bytes(members: &[Member]) -> usize {
    members.iter().map(|member| member.bytes).sum()
}

fn numbers(members: &[Member]) -> Vec<u32> {
    members.iter().map(|member| member.number).collect()
}

/// Pieces of at most `most` bytes; a larger member is alone.
fn cut(members: &[Member], most: usize) -> impl Iterator<Item = &[Member]> {
    let mut rest = members;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = rest.iter().take_while(|member| {
            bytes += member.bytes;
            bytes <= most
        });
        let count = fits.count().max(1);
        let (bucket, after) = rest.split_at_checked(count)?;
        rest = after;
        Some(bucket)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;

    fn member(number: u32, bytes: usize, location: Location) -> Member {
        Member { number, fuses_as: (DType::F32, ReduceOp::Sum.into()), bytes, location }
    }

    fn at(offset: usize) -> Location {
        Location::new(3, offset)
    }

    fn members(step: &[Member], most: usize) -> Vec<Vec<u32>> {
        layout(step, most).into_iter().map(|layout| layout.members).collect()
    }

    #[test]
    fn loose_members_keep_their_order_and_fill_buckets() {
        let step: Vec<Member> = (0..5).map(|number| member(number, 40, Location::PLAIN)).collect();
        assert_eq!(members(&step, 100), [vec![0, 1], vec![2, 3], vec![4]]);
    }

    #[test]
    fn a_member_larger_than_a_bucket_has_one_of_its_own() {
        let sizes = [10, 900, 10];
        let step: Vec<Member> =
            (0..3).map(|number| member(number, sizes[number as usize], Location::PLAIN)).collect();
        assert_eq!(members(&step, 100), [vec![0], vec![1], vec![2]]);
    }

    #[test]
    fn neighbours_in_memory_stay_together_in_whatever_order_they_came() {
        let step = [member(0, 40, at(80)), member(1, 40, at(0)), member(2, 40, at(40))];
        assert_eq!(members(&step, 1000), [vec![1, 2, 0]]);
    }

    #[test]
    fn a_gap_ends_a_large_bucket_and_small_pieces_are_copied_together() {
        let large =
            [member(0, WORTH, at(1 << 20)), member(1, WORTH, at(0)), member(2, WORTH, at(WORTH))];
        assert_eq!(members(&large, 1 << 20), [vec![1, 2], vec![0]]);
        let small = [
            member(0, 40, at(400)),
            member(1, 40, at(0)),
            member(2, 40, at(40)),
            member(3, 40, at(440)),
        ];
        assert_eq!(members(&small, 1000), [vec![1, 2, 0, 3]]);
    }

    #[test]
    fn different_reductions_never_share_a_bucket() {
        let other = Member {
            fuses_as: (DType::F32, ReduceOp::Max.into()),
            ..member(1, 4, Location::PLAIN)
        };
        assert_eq!(members(&[member(0, 4, Location::PLAIN), other], 100).len(), 2);
    }
}
