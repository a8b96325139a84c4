//! The group: the calls that users make.
#![expect(unsafe_code, reason = "hands tensors to the arena as pointers and lengths")]

mod exchange;

use crate::{
    DType, Element, Reduction,
    arena::Arena,
    bootstrap::{self, Connected, Wishes},
    bucket::{Bucket, BucketMemory, Buckets, Location, Place},
    call::{Call, Kind},
    error::{Error, FailureKind, Result},
    fork,
    health::{Health, Ticket},
    kernel::{self, Steps},
    link::Link,
    mesh::{Mesh, Peer},
    options::GroupOptions,
    pair::Pairs,
    plan::{self, Algorithm, Plan, Thresholds, Topology},
    rendezvous::Rendezvous,
    shm::{
        handover::{Channel, single},
        mapping::Mapping,
    },
    tiers::Tiered,
    tune::{self, Tuned},
    watch::Watch,
};
use rustix::fd::AsFd;
use std::{
    fmt, io,
    net::IpAddr,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

/// What came from every rank in an all-gather or all-to-all of varied sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Gathered<T> {
    /// All elements in rank order.
    pub values: Vec<T>,
    /// How many of them are of each rank.
    pub counts: Vec<usize>,
}

/// Ranks that communicate. Every rank makes the same calls in the same order, but for [`Group::send`] and
/// [`Group::receive`], which only two ranks make.
///
/// A clone is the same group. A group leaves when its last clone is dropped.
///
/// ```
/// use deuteron_collective::{Group, GroupOptions, LocalRendezvous, ReduceOp};
///
/// let threads: Vec<_> = LocalRendezvous::group(4)
///     .into_iter()
///     .map(|rendezvous| {
///         std::thread::spawn(move || {
///             let group = Group::connect(&rendezvous, GroupOptions::default())?;
///             let mut tensor = [group.rank() as f32; 3];
///             group.all_reduce(&mut tensor, ReduceOp::Sum)?;
///             Ok::<_, deuteron_collective::Error>(tensor)
///         })
///     })
///     .collect();
/// for thread in threads {
///     assert_eq!(thread.join().unwrap()?, [6.0; 3]);
/// }
/// # Ok::<(), deuteron_collective::Error>(())
/// ```
#[derive(Clone)]
pub struct Group {
    pub(crate) inner: Arc<Inner>,
    pub(crate) limit: Option<Duration>,
    pub(crate) thresholds: Thresholds,
}

pub(crate) struct Inner {
    pub health: Arc<Health>,
    pub topology: Topology,
    /// What the group was made with, for what is made of it later.
    pub options: GroupOptions,
    /// The ranks in the numbering of the group that this one was made from.
    members: Vec<usize>,
    forks: u32,
    /// Held while sub-groups are made: their rounds do not mix.
    pub making: Mutex<()>,
    tuned: OnceLock<Tuned>,
    /// Says goodbye before the connections close: fields are dropped in this order.
    watch: Option<Watch>,
    /// None where there is one rank.
    pairs: Option<Pairs>,
    parts: Mutex<Parts>,
}

/// What a call works with, one call at a time.
struct Parts {
    way: Way,
    buckets: Buckets,
    channels: Vec<Option<Channel>>,
}

enum Way {
    Alone,
    Shared(Arena),
    Linked(Mesh),
    Tiered(Box<Tiered>),
}

impl Way {
    /// The links of a group that does not share all memory, for calls that treat all ranks alike.
    fn links(&mut self, ticket: &mut Ticket<'_>) -> Result<Option<&mut Mesh>> {
        match self {
            Self::Alone | Self::Shared(_) => Ok(None),
            Self::Linked(mesh) => Ok(Some(mesh)),
            Self::Tiered(tiered) => tiered.mesh(ticket).map(Some),
        }
    }

    fn barrier(&mut self, ticket: &mut Ticket<'_>) -> Result<()> {
        match self {
            Self::Alone => Ok(()),
            Self::Shared(arena) => arena.barrier(ticket),
            Self::Linked(mesh) => mesh.barrier(ticket),
            Self::Tiered(tiered) => tiered.barrier(ticket),
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group(rank {} of {})", self.rank(), self.size())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.forks != fork::forks() {
            // A forked child: the watch thread and the connections are its parent's.
            let nothing =
                Parts { way: Way::Alone, buckets: Buckets::default(), channels: Vec::new() };
            std::mem::forget(self.watch.take());
            std::mem::forget(self.pairs.take());
            std::mem::forget(std::mem::replace(&mut self.parts, Mutex::new(nothing)));
        } else if let Some(own) = &self.health.neighbours[self.health.rank] {
            own.leave();
        }
    }
}

impl Group {
    /// Meets the other ranks and connects to those that the algorithms need.
    pub fn connect(rendezvous: &dyn Rendezvous, options: GroupOptions) -> Result<Self> {
        Self::assemble(rendezvous, options, (0..rendezvous.size()).collect())
    }

    /// The same with the ranks' numbers in the group that this one is made from.
    pub(crate) fn assemble(
        rendezvous: &dyn Rendezvous,
        mut options: GroupOptions,
        members: Vec<usize>,
    ) -> Result<Self> {
        options.address = options.address.or_else(|| rendezvous.address());
        let (limit, start_limit) = (options.limit, options.start_limit);
        let (thresholds, tuning) = (options.thresholds, options.tuning.clone().unwrap_or_default());
        let wishes = Wishes {
            security: &options.security,
            host: options.host.clone(),
            address: options.address,
            share_memory: options.share_memory,
            memory_domain: options.memory_domain.clone(),
            flat: options.flat,
            limit: options.start_limit,
            star: false,
        };
        fork::watch();
        let (rank, size) = (rendezvous.rank(), rendezvous.size());
        let connected = bootstrap::connect(rendezvous, &wishes)?;
        let Connected { hosts, cores, crowded, neighbours, channels, directory, .. } = connected;
        let Connected { shared, layout, peers, near, remote, .. } = connected;
        let tiered = layout.is_some();
        let arena = |me: usize, names: Vec<usize>| {
            let members = names.iter().filter_map(|rank| neighbours[*rank].clone()).collect();
            Arena::new(me, names, members, crowded)
        };
        let way = if size == 1 {
            Way::Alone
        } else if shared {
            Way::Shared(arena(rank, (0..size).collect()))
        } else if let Some(layout) = layout {
            let (host, place) = layout.place(rank);
            let arena = arena(place, layout.host(host).to_vec());
            Way::Tiered(Box::new(Tiered::new(rank, layout, arena, Mesh::new(rank, peers))))
        } else {
            Way::Linked(Mesh::new(rank, peers))
        };
        let failed = |error: io::Error| Error::system("the watch thread cannot start", error);
        let names = (0..size).map(|rank| rendezvous.name(rank)).collect();
        let health = Health::new(rank, names, hosts, rendezvous.generation(), neighbours)
            .map_err(|error| failed(error.into()))?;
        let health = Arc::new(health);
        let watch = match size {
            1 => None,
            _ => Some(
                Watch::start(Arc::clone(&health), options.heartbeat, near, remote)
                    .map_err(failed)?,
            ),
        };
        let inner = Inner {
            health,
            topology: Topology { ranks: size, shared, cores, tiered },
            members,
            forks: fork::forks(),
            making: Mutex::default(),
            tuned: OnceLock::new(),
            watch,
            pairs: Some(Pairs::new(directory)).filter(|_| size > 1),
            parts: Mutex::new(Parts { way, buckets: Buckets::default(), channels }),
            options,
        };
        let group = Self { inner: Arc::new(inner), limit, thresholds };
        // Nobody returns before everybody watches: from here on a death has a name.
        group.within(start_limit).barrier()?;
        let Some(tuned) = tune::tune(&group.within(start_limit), &tuning)? else {
            return Ok(group);
        };
        let tuned = group.inner.tuned.get_or_init(|| tuned);
        Ok(group.with_thresholds(tuned.thresholds))
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.inner.health.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.inner.topology.ranks
    }

    /// This group's ranks in the numbering of the group that it was made from; all of them, if from none.
    pub fn parent_ranks(&self) -> &[usize] {
        &self.inner.members
    }

    /// This group's ranks in the numbering of the outermost group, which errors and logs use.
    pub fn outer_ranks(&self) -> &[usize] {
        &self.inner.health.names
    }

    /// Attempt number of the gang.
    pub fn generation(&self) -> u64 {
        self.inner.health.generation
    }

    /// The name of a rank's host.
    pub fn host(&self, rank: usize) -> &str {
        self.inner.health.host(rank)
    }

    /// Whether every pair of ranks shares memory.
    pub fn shares_memory(&self) -> bool {
        self.inner.topology.shared
    }

    /// The same group with another limit for the calls made through it.
    #[must_use]
    pub fn within(&self, limit: Duration) -> Self {
        Self { limit: Some(limit), ..self.clone() }
    }

    /// The same group, carrying calls out in another way; the same on every rank.
    pub(crate) fn with_thresholds(&self, thresholds: Thresholds) -> Self {
        Self { thresholds, ..self.clone() }
    }

    /// Where one algorithm gives way to the next.
    pub fn thresholds(&self) -> &Thresholds {
        &self.thresholds
    }

    /// What was measured of this machine and what followed, if the group was [tuned](GroupOptions::tuning).
    pub fn tuned(&self) -> Option<&Tuned> {
        self.inner.tuned.get()
    }

    /// Ranks, cores, and whether memory is shared.
    pub fn topology(&self) -> &Topology {
        &self.inner.topology
    }

    /// How a call of `bytes` per rank would be carried out, and why.
    pub fn explain(&self, kind: Kind, bytes: usize, registered: bool) -> Plan {
        plan::choose(kind, bytes, registered, &self.inner.topology, &self.thresholds)
    }

    /// Ends the group on all ranks: their pending and next calls fail with `reason`.
    pub fn abort(&self, reason: &str) {
        self.inner.health.fail(self.inner.health.own(FailureKind::Aborted, reason.into()));
    }

    /// Replaces every rank's elements with the combination of all ranks'. All ranks get the same bits.
    ///
    /// A tensor in a [`Bucket`] is reduced where it lies. After an error its content is undefined.
    pub fn all_reduce<T: Element>(
        &self,
        tensor: &mut [T],
        reduction: impl Into<Reduction>,
    ) -> Result<()> {
        let call = Call {
            reduction: reduction.into(),
            ..Call::new(Kind::AllReduce, T::DTYPE, tensor.len())
        };
        let mut parts = self.enter(&call)?;
        let mut ticket = self.ticket(&call);
        let bytes = bytes_mut(tensor);
        let Parts { way, buckets, .. } = &mut *parts;
        match way {
            Way::Alone => {
                let steps = Steps::whole(call.reduction, 1);
                let pointer = bytes.as_mut_ptr();
                // SAFETY: the slice is the caller's.
                unsafe { kernel::reduce(call.dtype, &steps, &[pointer], &[pointer], call.count) };
                Ok(())
            }
            Way::Shared(arena) => {
                let plan = self.explain(call.kind, call.bytes(), false);
                let place = self.place(&call, bytes.as_ptr(), buckets);
                // SAFETY: the slice is borrowed mutably for the whole call.
                unsafe { arena.all_reduce(&mut ticket, &plan, bytes.as_mut_ptr(), place) }
            }
            Way::Linked(mesh) => {
                let plan = self.explain(call.kind, call.bytes(), false);
                mesh.all_reduce(&mut ticket, &plan, bytes)
            }
            Way::Tiered(tiered) => {
                let plan = self.explain(call.kind, call.bytes(), false);
                let place = self.place(&call, bytes.as_ptr(), buckets);
                // SAFETY: the slice is borrowed mutably for the whole call.
                unsafe {
                    let (tensor, thresholds) = (bytes.as_mut_ptr(), &self.thresholds);
                    tiered.all_reduce(&mut ticket, &plan, thresholds, tensor, place)
                }
            }
        }
    }

    /// Fills `output` with every rank's `input`, in rank order. All inputs have the same length.
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        if output.len() != input.len() * self.size() {
            return Err(Error::Invalid(format!(
                "all_gather of {} elements from {} ranks needs an output of {}, not {}",
                input.len(),
                self.size(),
                input.len() * self.size(),
                output.len()
            )));
        }
        let call = Call::new(Kind::AllGather, T::DTYPE, input.len());
        let ranges: Vec<Range<usize>> =
            (0..self.size()).map(|rank| rank * call.bytes()..(rank + 1) * call.bytes()).collect();
        self.gather(&call, input, output, &ranges)
    }

    /// Every rank's elements in rank order, as many as each has.
    ///
    /// ```
    /// # use deuteron_collective::{Group, GroupOptions, LocalRendezvous};
    /// # let rendezvous = LocalRendezvous::group(1).remove(0);
    /// let group = Group::connect(&rendezvous, GroupOptions::default())?;
    /// let gathered = group.all_gather_varied(&[1i64, 2, 3])?;
    /// assert_eq!((gathered.values, gathered.counts), (vec![1, 2, 3], vec![3]));
    /// # Ok::<(), deuteron_collective::Error>(())
    /// ```
    pub fn all_gather_varied<T: Element + Default>(&self, input: &[T]) -> Result<Gathered<T>> {
        let mut counts = vec![0i64; self.size()];
        self.all_gather(&[input.len() as i64], &mut counts)?;
        let counts: Vec<usize> = counts.into_iter().map(|count| count as usize).collect();
        let call = Call::new(Kind::AllGatherVaried, T::DTYPE, counts.iter().sum());
        let mut values = vec![T::default(); call.count];
        let mut end = 0;
        let ranges: Vec<Range<usize>> = counts
            .iter()
            .map(|count| {
                let start = end;
                end += count * call.dtype.size();
                start..end
            })
            .collect();
        self.gather(&call, input, &mut values, &ranges)?;
        Ok(Gathered { values, counts })
    }

    /// Replaces every rank's elements with the root's.
    pub fn broadcast<T: Element>(&self, tensor: &mut [T], root: usize) -> Result<()> {
        if root >= self.size() {
            return Err(Error::Invalid(format!("there is no rank {root} among {}", self.size())));
        }
        let call = Call { root, ..Call::new(Kind::Broadcast, T::DTYPE, tensor.len()) };
        let mut parts = self.enter(&call)?;
        let mut ticket = self.ticket(&call);
        let plan = self.explain(call.kind, call.bytes(), false);
        let bytes = bytes_mut(tensor);
        let Parts { way, buckets, .. } = &mut *parts;
        match way {
            Way::Alone => {}
            Way::Shared(arena) => {
                let place = self.place(&call, bytes.as_ptr(), buckets);
                let ranges: Vec<Range<usize>> = (0..self.size())
                    .map(|rank| if rank == root { 0..bytes.len() } else { 0..0 })
                    .collect();
                let tensor = bytes.as_mut_ptr();
                // SAFETY: the slice is borrowed mutably for the whole call, and input and output are the same.
                unsafe { arena.gather(&mut ticket, &plan, tensor, tensor, &ranges, place)? };
            }
            Way::Linked(mesh) => mesh.broadcast(&mut ticket, &plan, bytes)?,
            Way::Tiered(tiered) => {
                tiered.broadcast(&mut ticket, &plan, &self.thresholds, bytes)?;
            }
        }
        make_valid(call.dtype, bytes);
        Ok(())
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<()> {
        self.meet(&Call::new(Kind::Barrier, DType::U8, 0))
    }

    /// Returns when every rank has made the same call, which moves no elements.
    pub(crate) fn meet(&self, call: &Call) -> Result<()> {
        let mut parts = self.enter(call)?;
        let mut ticket = self.ticket(call);
        parts.way.barrier(&mut ticket)
    }

    /// Makes memory of the group for `len` elements, zeroed: what lies in it is reduced in place. Every rank
    /// calls it with the same length. Where ranks do not share memory it is memory like any other.
    pub fn bucket<T: Element>(&self, len: usize) -> Result<Bucket<T>> {
        let call = Call::new(Kind::Bucket, T::DTYPE, len);
        let mut parts = self.enter(&call)?;
        let mut ticket = self.ticket(&call);
        let made = Mapping::create("deuteron-bucket", call.bytes().max(1));
        let Parts { way, buckets, channels } = &mut *parts;
        let mut theirs: Vec<Option<Mapping>> = channels.iter().map(|_| None).collect();
        // All agree on the call, and that memory could be had everywhere, before descriptors travel.
        way.barrier(&mut ticket)?;
        if matches!(way, Way::Shared(_) | Way::Tiered(_)) {
            let system = |context: String, error: rustix::io::Errno| {
                self.abort(&format!("{context}: {error}"));
                Error::system(context, error)
            };
            let context = || format!("no memory for a bucket of {} bytes", call.bytes());
            let (fd, _) = made.as_ref().map_err(|error| system(context(), *error))?;
            for (rank, channel) in channels.iter().enumerate() {
                let Some(channel) = channel else { continue };
                channel.send(&[3], &[fd.as_fd()]).map_err(|error| {
                    ticket.lost(rank, format!("a descriptor could not be sent to it: {error}"))
                })?;
            }
            for (rank, channel) in channels.iter().enumerate() {
                let Some(channel) = channel else { continue };
                let received = channel.receive(&mut [0], || {
                    ticket.check_near(|| vec![rank]).map_err(Interrupted::Stopped)
                });
                let mapping = match received {
                    Ok(descriptors) => single(descriptors).and_then(|fd| {
                        Mapping::of_neighbour(&fd, call.bytes().max(1))
                            .map_err(|error| system(context(), error))
                    })?,
                    Err(Interrupted::Stopped(error)) => return Err(error),
                    Err(Interrupted::Broken(error))
                        if error.kind() == io::ErrorKind::QuotaExceeded =>
                    {
                        self.abort(&format!("{call} failed: {error}"));
                        return Err(Error::system(call.to_string(), error));
                    }
                    Err(Interrupted::Broken(error)) => {
                        return Err(ticket.broken(rank, &error));
                    }
                };
                theirs[rank] = Some(mapping);
            }
            way.barrier(&mut ticket)?;
        }
        let (_, own) = made.map_err(|error| {
            Error::system(format!("no memory for a bucket of {} bytes", call.bytes()), error)
        })?;
        let memory = Arc::new(BucketMemory::new(buckets.next_id(), own, theirs));
        buckets.add(&memory);
        Ok(Bucket::new(memory, len))
    }

    fn gather<T: Element>(
        &self,
        call: &Call,
        input: &[T],
        output: &mut [T],
        ranges: &[Range<usize>],
    ) -> Result<()> {
        let mut parts = self.enter(call)?;
        let mut ticket = self.ticket(call);
        let plan = self.explain(call.kind, call.bytes(), false);
        let (input, output) = (bytes(input), bytes_mut(output));
        let Parts { way, buckets, .. } = &mut *parts;
        match way {
            Way::Alone => output.copy_from_slice(input),
            Way::Shared(arena) => {
                let place = self.place(call, input.as_ptr(), buckets);
                let (from, to) = (input.as_ptr(), output.as_mut_ptr());
                // SAFETY: both slices are borrowed for the whole call; their lengths are those of the ranges.
                unsafe { arena.gather(&mut ticket, &plan, from, to, ranges, place)? };
            }
            Way::Linked(mesh) => {
                output[ranges[self.rank()].clone()].copy_from_slice(input);
                mesh.all_gather(&mut ticket, ranges, output)?;
            }
            Way::Tiered(tiered) => {
                output[ranges[self.rank()].clone()].copy_from_slice(input);
                tiered.all_gather(&mut ticket, ranges, output)?;
            }
        }
        make_valid(call.dtype, output);
        Ok(())
    }

    /// Where a tensor lies, if its memory is registered.
    pub(crate) fn locate(&self, tensor: *const u8, bytes: usize) -> Location {
        let parts = self.inner.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.buckets.locate(tensor, bytes)
    }

    pub(crate) fn health(&self) -> &Arc<Health> {
        &self.inner.health
    }

    pub(crate) fn limit(&self) -> Option<Duration> {
        self.limit
    }

    /// Whether a rank shares memory with this one.
    pub(crate) fn is_near(&self, rank: usize) -> bool {
        self.inner.health.neighbours[rank].is_some()
    }

    /// Whether ranks have to share cores.
    pub(crate) fn is_crowded(&self) -> bool {
        self.inner.topology.ranks > self.inner.topology.cores
    }

    /// Links between the lowest rank and every other, made by all ranks together.
    pub(crate) fn star(&self) -> Result<Vec<Option<Box<dyn Link>>>> {
        let options = &self.inner.options;
        let wishes = Wishes {
            security: &options.security,
            host: options.host.clone(),
            address: options.address,
            share_memory: options.share_memory,
            memory_domain: options.memory_domain.clone(),
            flat: options.flat,
            limit: options.start_limit,
            star: true,
        };
        let connected = bootstrap::connect(&Among(self), &wishes)?;
        Ok(connected.peers.into_iter().map(|peer| peer.map(Peer::into_link)).collect())
    }

    /// Where a tensor lies, if its memory is registered and the call is large enough to use that.
    fn place<'a>(&self, call: &Call, tensor: *const u8, buckets: &'a Buckets) -> Place<'a> {
        let plan = self.explain(call.kind, call.bytes(), true);
        let location = match plan.algorithm {
            Algorithm::InPlace | Algorithm::TieredShares => buckets.locate(tensor, call.bytes()),
            _ => Location::PLAIN,
        };
        Place { location, buckets }
    }

    fn ticket<'a>(&'a self, call: &'a Call) -> Ticket<'a> {
        Ticket::new(&self.inner.health, call, self.limit)
    }

    fn pairs(&self) -> Result<&Pairs> {
        let alone = || Error::Invalid("there is no other rank".into());
        self.inner.pairs.as_ref().ok_or_else(alone)
    }

    /// Takes what a collective call works with.
    fn enter(&self, call: &Call) -> Result<MutexGuard<'_, Parts>> {
        self.admit(call)?;
        Ok(self.inner.parts.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Refuses a call on a group that is dead or another process's.
    fn admit(&self, call: &Call) -> Result<()> {
        if self.inner.forks != fork::forks() {
            return Err(Error::Invalid(
                "this process is a fork of the rank that made the group; only the rank may use it"
                    .into(),
            ));
        }
        if self.inner.health.failure().is_some() {
            return Err(self.inner.health.error(call));
        }
        Ok(())
    }
}

/// The rendezvous of ranks that are a group already.
struct Among<'a>(&'a Group);

impl Rendezvous for Among<'_> {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn generation(&self) -> u64 {
        self.0.generation()
    }

    fn all_gather(&self, message: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>> {
        let Gathered { values, counts } = self.0.within(limit).all_gather_varied(message)?;
        let mut rest = &values[..];
        let mut take = |count: usize| {
            let (one, after) = rest.split_at(count);
            rest = after;
            one.to_vec()
        };
        Ok(counts.into_iter().map(&mut take).collect())
    }

    fn check(&self) -> Result<()> {
        match self.0.inner.health.failure() {
            Some(_) => Err(self.0.inner.health.error(&"connecting")),
            None => Ok(()),
        }
    }

    fn abandon(&self, reason: &str) {
        self.0.abort(reason);
    }

    fn address(&self) -> Option<IpAddr> {
        self.0.inner.options.address
    }

    fn name(&self, rank: usize) -> usize {
        self.0.inner.health.name(rank)
    }
}

/// Why a descriptor did not come.
enum Interrupted {
    Stopped(Error),
    Broken(io::Error),
}

impl From<io::Error> for Interrupted {
    fn from(error: io::Error) -> Self {
        Self::Broken(error)
    }
}

fn bytes<T: Element>(tensor: &[T]) -> &[u8] {
    // SAFETY: elements are plain memory without padding.
    unsafe { std::slice::from_raw_parts(tensor.as_ptr().cast(), size_of_val(tensor)) }
}

fn bytes_mut<T: Element>(tensor: &mut [T]) -> &mut [u8] {
    // SAFETY: as above; what is written into it is valid for the type, see `make_valid`.
    unsafe { std::slice::from_raw_parts_mut(tensor.as_mut_ptr().cast(), size_of_val(tensor)) }
}

/// Bytes that came from elsewhere may be anything; only `bool` minds.
fn make_valid(dtype: DType, bytes: &mut [u8]) {
    if dtype == DType::Bool {
        // SAFETY: the slice is ours.
        unsafe { kernel::canonical_bool(bytes.as_mut_ptr(), bytes.len()) };
    }
}
