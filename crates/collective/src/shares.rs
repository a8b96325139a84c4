//! Who gets how much from whom in an all-to-all, in bytes.

use std::ops::Range;

/// The parts of every rank's input and output. Inputs lie in the order of those who get them, outputs in the order of
/// those who gave them.
pub(crate) enum Shares {
    /// Everybody gives as much to everybody.
    Equal { ranks: usize, bytes: usize },
    /// A row for each rank that gives.
    Varied { ranks: usize, bytes: Vec<usize> },
}

impl Shares {
    pub fn ranks(&self) -> usize {
        match self {
            Self::Equal { ranks, .. } | Self::Varied { ranks, .. } => *ranks,
        }
    }

    pub fn bytes(&self, from: usize, to: usize) -> usize {
        match self {
            Self::Equal { bytes, .. } => *bytes,
            Self::Varied { ranks, bytes } => bytes[from * ranks + to],
        }
    }

    /// Where in the input of `from` the part of `to` lies.
    pub fn given(&self, from: usize, to: usize) -> Range<usize> {
        let start = match self {
            Self::Equal { bytes, .. } => to * bytes,
            Self::Varied { .. } => (0..to).map(|before| self.bytes(from, before)).sum(),
        };
        start..start + self.bytes(from, to)
    }

    /// Where in the output of `to` the part of `from` lies.
    pub fn taken(&self, from: usize, to: usize) -> Range<usize> {
        let start = match self {
            Self::Equal { bytes, .. } => from * bytes,
            Self::Varied { .. } => (0..from).map(|before| self.bytes(before, to)).sum(),
        };
        start..start + self.bytes(from, to)
    }

    /// All that a rank gives, itself included.
    pub fn total(&self, from: usize) -> usize {
        self.given(from, self.ranks() - 1).end
    }

    /// Where the part of `to` lies when `from` gives to the others one after the other, first to the rank after it.
    pub fn in_turn(&self, from: usize, to: usize) -> Range<usize> {
        let (own, part) = (self.given(from, from), self.given(from, to));
        let start = match to > from {
            true => part.start - own.end,
            false => self.total(from) - own.end + part.start,
        };
        start..start + part.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_without_gaps() {
        let varied = Shares::Varied { ranks: 3, bytes: vec![1, 2, 3, 0, 4, 5, 6, 0, 7] };
        let equal = Shares::Equal { ranks: 3, bytes: 4 };
        for shares in [&varied, &equal] {
            for rank in 0..3 {
                let (mut given, mut taken, mut turn) = (0, 0, 0);
                for other in 0..3 {
                    assert_eq!(shares.given(rank, other).start, given);
                    assert_eq!(shares.taken(other, rank).start, taken);
                    given = shares.given(rank, other).end;
                    taken = shares.taken(other, rank).end;
                }
                for other in [(rank + 1) % 3, (rank + 2) % 3] {
                    assert_eq!(shares.in_turn(rank, other).start, turn);
                    turn = shares.in_turn(rank, other).end;
                }
                assert_eq!(shares.total(rank), given);
                assert_eq!(turn, given - shares.bytes(rank, rank));
            }
        }
        assert_eq!(varied.taken(2, 2), 8..15);
    }
}
