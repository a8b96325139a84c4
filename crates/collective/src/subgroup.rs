//! Sub-groups: some of a group's ranks that communicate on their own, made while the group runs.
//!
//! The parent is their rendezvous. Once made, a sub-group has its own connections, lock and watch, and the parent may
//! be used, fail or be dropped without it.
//!
//! - SUB-1: a round is one `all_gather_varied` of the parent, and every rank of the parent takes part in every round.
//!   A rank that is a member of nothing, or whose group is made, says so with an empty message, until all have said
//!   so in the same round. So groups that need more rounds than others are made side by side.
//! - SUB-2: nobody waits for a group that cannot be made: it ends the parent, with the reason.

use crate::{
    DType, Group,
    call::{Call, Kind, disagreement},
    error::{Error, FailureKind, Result},
    options::GroupOptions,
    rendezvous::Rendezvous,
};
use std::{net::IpAddr, sync::PoisonError, time::Duration};

/// Marks a message of a rank whose group is being made.
const OPEN: u8 = 0;
/// Marks the message of a rank that needs no more rounds.
const DONE: u8 = 1;
/// Longest list that an error shows whole.
const SHOWN: usize = 16;

impl Group {
    /// Makes a group of some of the ranks, while others may be in use. Every rank of this group calls it with the same
    /// ranks, in any order; those that are not among them get `None`. Ranks of the new group are numbered in order, and
    /// its errors use the numbers of the outermost group.
    ///
    /// A sub-group has connections of its own: threads that use different groups never wait for each other. It
    /// inherits this group's options, lives on when this group is dropped, and leaves when it is dropped itself. If it
    /// cannot be made, this group ends too.
    ///
    /// ```
    /// # use deuteron_collective::{Group, GroupOptions, LocalRendezvous, ReduceOp};
    /// # let threads: Vec<_> = LocalRendezvous::group(3)
    /// #     .into_iter()
    /// #     .map(|rendezvous| {
    /// #         std::thread::spawn(move || {
    /// # let group = Group::connect(&rendezvous, GroupOptions::default())?;
    /// if let Some(pair) = group.subgroup(&[0, 2])? {
    ///     let mut tensor = [1f32; 3];
    ///     pair.all_reduce(&mut tensor, ReduceOp::Sum)?;
    ///     assert_eq!(tensor, [2.0; 3]);
    /// }
    /// # Ok::<(), deuteron_collective::Error>(())
    /// #         })
    /// #     })
    /// #     .collect();
    /// # threads.into_iter().try_for_each(|thread| thread.join().unwrap())?;
    /// # Ok::<(), deuteron_collective::Error>(())
    /// ```
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Option<Self>> {
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        let problem = if ranks.is_empty() {
            Some("a sub-group needs at least one rank".to_owned())
        } else if let Some(rank) = ranks.iter().find(|rank| **rank >= self.size()) {
            Some(format!("there is no rank {rank} among {}", self.size()))
        } else {
            let twice = ranks.windows(2).find(|pair| pair[0] == pair[1]);
            twice.map(|pair| format!("rank {} is named twice for a sub-group", pair[0]))
        };
        if let Some(problem) = problem {
            return Err(Error::Invalid(problem));
        }
        let colour = ranks.binary_search(&self.rank()).is_ok().then_some(0);
        self.divide(&Wish::Ranks(&ranks), colour)
    }

    /// Makes a group of all ranks that give the same colour; those that give none get `None`. Otherwise as
    /// [`Group::subgroup`].
    pub fn split(&self, colour: Option<u32>) -> Result<Option<Self>> {
        self.divide(&Wish::Colours, colour)
    }

    fn divide(&self, wish: &Wish<'_>, colour: Option<u32>) -> Result<Option<Self>> {
        let _making = self.inner.making.lock().unwrap_or_else(PoisonError::into_inner);
        let call = Call::new(Kind::Subgroup, DType::U8, 0);
        self.meet(&call)?;
        let colours = self.agree(&call, wish, colour)?;
        let same = |other: &Option<u32>| colour.is_some() && *other == colour;
        let members: Vec<usize> = (0..self.size()).filter(|rank| same(&colours[*rank])).collect();
        let rounds = Rounds { parent: self, call: &call, members: &members };
        let group = match colour {
            None => None,
            Some(_) => Some(rounds.assemble()?),
        };
        while !rounds.all_done()? {}
        Ok(group)
    }

    /// Everybody's colour, if all ranks wish for the same.
    fn agree(&self, call: &Call, wish: &Wish<'_>, colour: Option<u32>) -> Result<Vec<Option<u32>>> {
        let mut all = vec![0i64; 2 * self.size()];
        self.all_gather(&[wish.fingerprint(), colour.map_or(-1, i64::from)], &mut all)?;
        if all.iter().step_by(2).any(|fingerprint| *fingerprint != all[0]) {
            let shown = self.all_gather_varied(wish.to_string().as_bytes())?;
            let texts = split(&shown.values, &shown.counts);
            let texts = texts.map(|text| String::from_utf8_lossy(text).into_owned());
            let wishes: Vec<_> = self.outer_ranks().iter().copied().zip(texts).collect();
            let health = &self.inner.health;
            health.fail(health.own(FailureKind::Mismatch, disagreement(&wishes)));
            return Err(health.error(call));
        }
        Ok(all.iter().skip(1).step_by(2).map(|colour| u32::try_from(*colour).ok()).collect())
    }
}

/// What all ranks have to ask for alike.
enum Wish<'a> {
    Ranks(&'a [usize]),
    Colours,
}

impl Wish<'_> {
    fn fingerprint(&self) -> i64 {
        let ranks = match self {
            Self::Ranks(ranks) => ranks,
            Self::Colours => &[][..],
        };
        ranks.iter().fold(ranks.len() as u64, |hash, rank| {
            let mixed = (hash ^ *rank as u64).wrapping_mul(0xd6e8_feb8_6659_fd93);
            mixed ^ (mixed >> 32)
        }) as i64
    }
}

impl std::fmt::Display for Wish<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Colours => f.write_str("split()"),
            Self::Ranks(ranks) if ranks.len() <= SHOWN => write!(f, "subgroup({ranks:?})"),
            Self::Ranks(ranks) => {
                write!(f, "subgroup({:?} and {} more)", &ranks[..SHOWN], ranks.len() - SHOWN)
            }
        }
    }
}

/// The slices of the given lengths.
fn split<'a>(mut bytes: &'a [u8], counts: &'a [usize]) -> impl Iterator<Item = &'a [u8]> {
    counts.iter().map(move |count| {
        let (first, rest) = bytes.split_at(*count);
        bytes = rest;
        first
    })
}

/// The rendezvous of one sub-group, over its parent.
struct Rounds<'a> {
    parent: &'a Group,
    call: &'a Call,
    /// In the parent's numbering.
    members: &'a [usize],
}

impl Rounds<'_> {
    fn assemble(&self) -> Result<Group> {
        let parent = &self.parent.inner;
        let Group { limit, thresholds, .. } = *self.parent;
        let options = GroupOptions { limit, thresholds, tuning: None, ..parent.options.clone() };
        Group::assemble(self, options, self.members.to_vec()).map_err(|error| {
            self.abandon(&error.to_string());
            let mine = parent.health.name(parent.health.rank);
            match parent.health.failure() {
                // Whatever ended the parent is why this group could not be made, unless it was the other way round.
                Some(failure) if failure.kind != FailureKind::Aborted || failure.rank != mine => {
                    parent.health.error(self.call)
                }
                _ => error,
            }
        })
    }

    fn round(&self, mark: u8, message: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>> {
        let marked: Vec<u8> = [mark].iter().chain(message).copied().collect();
        let gathered = self.parent.within(limit).all_gather_varied(&marked)?;
        Ok(split(&gathered.values, &gathered.counts).map(<[u8]>::to_vec).collect())
    }

    /// One more round without anything to say; whether nobody had.
    fn all_done(&self) -> Result<bool> {
        let round = self.round(DONE, &[], self.parent.inner.options.start_limit)?;
        Ok(round.iter().all(|message| message.first() == Some(&DONE)))
    }
}

impl Rendezvous for Rounds<'_> {
    fn rank(&self) -> usize {
        self.members.partition_point(|member| *member < self.parent.rank())
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn generation(&self) -> u64 {
        self.parent.generation()
    }

    fn all_gather(&self, message: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>> {
        let round = self.round(OPEN, message, limit)?;
        let heard = |member: &usize| match round[*member].split_first() {
            Some((&OPEN, message)) => Ok(message.to_vec()),
            _ => Err(Error::Bootstrap(format!(
                "rank {} made its group in fewer rounds, which is a bug",
                self.parent.inner.health.name(*member)
            ))),
        };
        self.members.iter().map(heard).collect()
    }

    fn check(&self) -> Result<()> {
        let health = &self.parent.inner.health;
        health.failure().map_or(Ok(()), |_| Err(health.error(self.call)))
    }

    fn abandon(&self, reason: &str) {
        self.parent.abort(&format!("a sub-group could not be made: {reason}"));
    }

    fn address(&self) -> Option<IpAddr> {
        self.parent.inner.options.address
    }

    fn name(&self, rank: usize) -> usize {
        self.parent.inner.health.name(self.members[rank])
    }
}
