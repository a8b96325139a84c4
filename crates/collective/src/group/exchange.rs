//! The calls that give every rank another part, and messages between two ranks.
#![expect(unsafe_code, reason = "hands tensors to the arena as pointers and lengths")]

use super::{Gathered, Group, Parts, Way, bytes, bytes_mut, make_valid};
use crate::{
    Element, Reduction,
    bucket::{Buckets, Location, Place},
    call::{Call, Kind, fingerprint_of},
    error::{Error, Result},
    frame::Purpose,
    health::Ticket,
    kernel::{self, Steps},
    mesh::Mesh,
    plan::Algorithm,
    shares::Shares,
};
use std::ops::Range;

impl Group {
    /// Fills `output` with this rank's part of the combination of all ranks' `input`: part r of `size` equal parts
    /// goes to rank r. An input in a [`Bucket`](crate::Bucket) is read where it lies.
    ///
    /// ```
    /// use deuteron_collective::{Group, GroupOptions, LocalRendezvous, ReduceOp};
    ///
    /// let threads: Vec<_> = LocalRendezvous::group(2)
    ///     .into_iter()
    ///     .map(|rendezvous| {
    ///         std::thread::spawn(move || {
    ///             let group = Group::connect(&rendezvous, GroupOptions::default())?;
    ///             let mut part = [0.0; 2];
    ///             group.reduce_scatter(&[1.0f32, 2.0, 3.0, 4.0], &mut part, ReduceOp::Sum)?;
    ///             Ok::<_, deuteron_collective::Error>(part)
    ///         })
    ///     })
    ///     .collect();
    /// let parts: Result<Vec<_>, _> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    /// assert_eq!(parts?, [[2.0, 4.0], [6.0, 8.0]]);
    /// # Ok::<(), deuteron_collective::Error>(())
    /// ```
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        reduction: impl Into<Reduction>,
    ) -> Result<()> {
        if input.len() != output.len() * self.size() {
            return Err(Error::Invalid(format!(
                "reduce_scatter to {} elements on each of {} ranks needs an input of {}, not {}",
                output.len(),
                self.size(),
                output.len() * self.size(),
                input.len()
            )));
        }
        let call = Call {
            reduction: reduction.into(),
            ..Call::new(Kind::ReduceScatter, T::DTYPE, input.len())
        };
        let each = output.len();
        let parts: Vec<Range<usize>> =
            (0..self.size()).map(|rank| rank * each..(rank + 1) * each).collect();
        self.scatter(&call, input, output, &parts)
    }

    /// The same with parts of different lengths: `counts[r]` elements go to rank r. All ranks pass the same counts.
    ///
    /// ```
    /// # use deuteron_collective::{Group, GroupOptions, LocalRendezvous, ReduceOp};
    /// # let rendezvous = LocalRendezvous::group(1).remove(0);
    /// let group = Group::connect(&rendezvous, GroupOptions::default())?;
    /// let mut part = [0; 3];
    /// group.reduce_scatter_varied(&[1i32, 2, 3], &[3], &mut part, ReduceOp::Max)?;
    /// assert_eq!(part, [1, 2, 3]);
    /// # Ok::<(), deuteron_collective::Error>(())
    /// ```
    pub fn reduce_scatter_varied<T: Element>(
        &self,
        input: &[T],
        counts: &[usize],
        output: &mut [T],
        reduction: impl Into<Reduction>,
    ) -> Result<()> {
        let name = Kind::ReduceScatterVaried.name();
        self.check_counts(name, counts, input.len())?;
        if output.len() != counts[self.rank()] {
            return Err(Error::Invalid(format!(
                "{name} gives rank {} {} elements, and its output has {}",
                self.rank(),
                counts[self.rank()],
                output.len()
            )));
        }
        let call = Call {
            reduction: reduction.into(),
            root: fingerprint_of(counts),
            ..Call::new(Kind::ReduceScatterVaried, T::DTYPE, input.len())
        };
        let mut end = 0;
        let parts: Vec<Range<usize>> = counts
            .iter()
            .map(|count| {
                let start = end;
                end += count;
                start..end
            })
            .collect();
        self.scatter(&call, input, output, &parts)
    }

    /// Sends part k of `size` equal parts of `input` to rank k, and fills `output` with the parts that are for this
    /// rank, in rank order.
    ///
    /// ```
    /// use deuteron_collective::{Group, GroupOptions, LocalRendezvous};
    ///
    /// let threads: Vec<_> = LocalRendezvous::group(2)
    ///     .into_iter()
    ///     .map(|rendezvous| {
    ///         std::thread::spawn(move || {
    ///             let group = Group::connect(&rendezvous, GroupOptions::default())?;
    ///             let (rank, mut output) = (group.rank() as u8, [0; 2]);
    ///             group.all_to_all(&[10 * rank, 10 * rank + 1], &mut output)?;
    ///             Ok::<_, deuteron_collective::Error>(output)
    ///         })
    ///     })
    ///     .collect();
    /// let outputs: Result<Vec<_>, _> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    /// assert_eq!(outputs?, [[0, 10], [1, 11]]);
    /// # Ok::<(), deuteron_collective::Error>(())
    /// ```
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let ranks = self.size();
        if input.len() != output.len() || !input.len().is_multiple_of(ranks) {
            return Err(Error::Invalid(format!(
                "all_to_all among {ranks} ranks needs an input and an output of the same length, a multiple of \
                 {ranks}, not {} and {}",
                input.len(),
                output.len()
            )));
        }
        let call = Call::new(Kind::AllToAll, T::DTYPE, input.len());
        let shares = Shares::Equal { ranks, bytes: call.bytes() / ranks };
        self.exchange(&call, input, output, &shares)
    }

    /// The same with as many elements for each rank as `counts` says. Returns what has come, in rank order.
    ///
    /// ```
    /// # use deuteron_collective::{Group, GroupOptions, LocalRendezvous};
    /// # let rendezvous = LocalRendezvous::group(1).remove(0);
    /// let group = Group::connect(&rendezvous, GroupOptions::default())?;
    /// let received = group.all_to_all_varied(&[1i64, 2, 3], &[3])?;
    /// assert_eq!((received.values, received.counts), (vec![1, 2, 3], vec![3]));
    /// # Ok::<(), deuteron_collective::Error>(())
    /// ```
    pub fn all_to_all_varied<T: Element + Default>(
        &self,
        input: &[T],
        counts: &[usize],
    ) -> Result<Gathered<T>> {
        let (rank, ranks, size) = (self.rank(), self.size(), T::DTYPE.size());
        self.check_counts(Kind::AllToAllVaried.name(), counts, input.len())?;
        let counts: Vec<i64> = counts.iter().map(|count| *count as i64).collect();
        let mut all = vec![0i64; ranks * ranks];
        self.all_gather(&counts, &mut all)?;
        let all: Vec<usize> = all.into_iter().map(|count| count as usize).collect();
        let counts: Vec<usize> = (0..ranks).map(|from| all[from * ranks + rank]).collect();
        let call = Call::new(Kind::AllToAllVaried, T::DTYPE, all.iter().sum());
        let bytes = all.into_iter().map(|count| count * size).collect();
        let mut values = vec![T::default(); counts.iter().sum()];
        self.exchange(&call, input, &mut values, &Shares::Varied { ranks, bytes })?;
        Ok(Gathered { values, counts })
    }

    /// Sends the elements to another rank, which receives as many of the same type. Messages to one rank arrive in
    /// the order in which they are sent. It may return before the other rank has come, or wait for it.
    ///
    /// Only the two ranks call. Threads that talk to different ranks, or that are in a collective of the group, do not
    /// wait for each other.
    ///
    /// ```
    /// use deuteron_collective::{Group, GroupOptions, LocalRendezvous};
    ///
    /// let threads: Vec<_> = LocalRendezvous::group(2)
    ///     .into_iter()
    ///     .map(|rendezvous| {
    ///         std::thread::spawn(move || {
    ///             let group = Group::connect(&rendezvous, GroupOptions::default())?;
    ///             let mut tensor = [1.5f32, 2.5];
    ///             match group.rank() {
    ///                 0 => group.send(&tensor, 1)?,
    ///                 _ => {
    ///                     tensor = [0.0; 2];
    ///                     group.receive(&mut tensor, 0)?;
    ///                 }
    ///             }
    ///             Ok::<_, deuteron_collective::Error>(tensor)
    ///         })
    ///     })
    ///     .collect();
    /// for thread in threads {
    ///     assert_eq!(thread.join().unwrap()?, [1.5, 2.5]);
    /// }
    /// # Ok::<(), deuteron_collective::Error>(())
    /// ```
    pub fn send<T: Element>(&self, tensor: &[T], to: usize) -> Result<()> {
        self.check_other(to)?;
        let call = Call { root: to, ..Call::new(Kind::Send, T::DTYPE, tensor.len()) };
        self.admit(&call)?;
        let pairs = self.pairs()?;
        pairs.send(&mut self.ticket(&call), to, bytes(tensor))
    }

    /// Fills `tensor` with the next message of another rank, see [`Group::send`].
    ///
    /// ```
    /// use deuteron_collective::{Error, Group, GroupOptions, LocalRendezvous};
    /// let rendezvous = LocalRendezvous::group(1).remove(0);
    /// let group = Group::connect(&rendezvous, GroupOptions::default())?;
    /// assert!(matches!(group.receive(&mut [0u8; 4], 0), Err(Error::Invalid(_)))); // from itself
    /// # Ok::<(), deuteron_collective::Error>(())
    /// ```
    pub fn receive<T: Element>(&self, tensor: &mut [T], from: usize) -> Result<()> {
        self.check_other(from)?;
        let call = Call { root: from, ..Call::new(Kind::Receive, T::DTYPE, tensor.len()) };
        self.admit(&call)?;
        let pairs = self.pairs()?;
        let bytes = bytes_mut(tensor);
        let result = pairs.receive(&mut self.ticket(&call), from, bytes);
        // Also after an error, which may come in the middle of the elements.
        make_valid(call.dtype, bytes);
        result
    }

    fn check_other(&self, rank: usize) -> Result<()> {
        if rank >= self.size() {
            return Err(Error::Invalid(format!("there is no rank {rank} among {}", self.size())));
        }
        if rank == self.rank() {
            return Err(Error::Invalid(format!("rank {rank} cannot send to itself")));
        }
        Ok(())
    }

    fn check_counts(&self, name: &str, counts: &[usize], len: usize) -> Result<()> {
        if counts.len() != self.size() {
            return Err(Error::Invalid(format!(
                "{name} among {} ranks needs as many counts, not {}",
                self.size(),
                counts.len()
            )));
        }
        let total = counts.iter().try_fold(0usize, |total, count| total.checked_add(*count));
        if total != Some(len) {
            return Err(Error::Invalid(format!(
                "the counts of {name} are not those of an input of {len} elements: {counts:?}"
            )));
        }
        Ok(())
    }

    fn scatter<T: Element>(
        &self,
        call: &Call,
        input: &[T],
        output: &mut [T],
        parts: &[Range<usize>],
    ) -> Result<()> {
        let mut held = self.enter(call)?;
        let mut ticket = self.ticket(call);
        let plan = self.explain(call.kind, call.bytes(), false);
        let (input, output) = (bytes(input), bytes_mut(output));
        let Parts { way, buckets, .. } = &mut *held;
        match way {
            Way::Alone => {
                let steps = Steps::whole(call.reduction, 1);
                let (from, to) = (input.as_ptr(), output.as_mut_ptr());
                // SAFETY: both slices are the caller's and as long as the call's elements.
                unsafe { kernel::reduce(call.dtype, &steps, &[from], &[to], call.count) };
                Ok(())
            }
            Way::Shared(arena) => {
                let place = self.input_place(call, input, buckets);
                let (from, to) = (input.as_ptr(), output.as_mut_ptr());
                // SAFETY: both slices are borrowed for the whole call; their lengths are those of the parts.
                unsafe { arena.reduce_scatter(&mut ticket, &plan, from, to, parts, place) }
            }
            Way::Linked(_) | Way::Tiered(_) => {
                let size = call.dtype.size();
                let parts: Vec<Range<usize>> =
                    parts.iter().map(|part| part.start * size..part.end * size).collect();
                way.links(&mut ticket)?.map_or(Ok(()), |mesh| {
                    mesh.reduce_scatter(&mut ticket, &plan, input, output, &parts)
                })
            }
        }
    }

    fn exchange<T: Element>(
        &self,
        call: &Call,
        input: &[T],
        output: &mut [T],
        shares: &Shares,
    ) -> Result<()> {
        let mut held = self.enter(call)?;
        let mut ticket = self.ticket(call);
        let plan = self.explain(call.kind, call.bytes(), false);
        let (input, output) = (bytes(input), bytes_mut(output));
        let Parts { way, buckets, .. } = &mut *held;
        let result = match way {
            Way::Alone => {
                output.copy_from_slice(input);
                Ok(())
            }
            Way::Shared(arena) => {
                let place = self.input_place(call, input, buckets);
                let (from, to) = (input.as_ptr(), output.as_mut_ptr());
                // SAFETY: both slices are borrowed for the whole call; their lengths are those of the shares.
                unsafe { arena.all_to_all(&mut ticket, &plan, from, to, shares, place) }
            }
            Way::Linked(_) | Way::Tiered(_) => match way.links(&mut ticket) {
                Ok(Some(mesh)) => self
                    .complete(&mut ticket, mesh)
                    .and_then(|()| mesh.all_to_all(&mut ticket, input, output, shares)),
                Ok(None) => Ok(()),
                Err(error) => Err(error),
            },
        };
        // Also after an error, which may come in the middle of the elements.
        make_valid(call.dtype, output);
        result
    }

    /// Opens the links that only an all-to-all needs, at the first one.
    fn complete(&self, ticket: &mut Ticket<'_>, mesh: &mut Mesh) -> Result<()> {
        let missing = mesh.missing(ticket)?;
        let wanted: Vec<(usize, Purpose)> =
            missing.iter().map(|rank| (*rank, Purpose::Data)).collect();
        let links = match wanted.is_empty() {
            true => Vec::new(),
            false => self.pairs()?.open(ticket, &wanted)?,
        };
        mesh.add(missing.into_iter().zip(links));
        Ok(())
    }

    /// Where an input lies whose length may differ from rank to rank, if it is registered and all ranks together make
    /// that worth while.
    fn input_place<'a>(&self, call: &Call, input: &[u8], buckets: &'a Buckets) -> Place<'a> {
        let plan = self.explain(call.kind, call.bytes(), true);
        let location = match plan.algorithm {
            Algorithm::InPlace => buckets.locate(input.as_ptr(), input.len()),
            _ => Location::PLAIN,
        };
        Place { location, buckets }
    }
}
