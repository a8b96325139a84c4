//! From a rendezvous to connections: who is where, who shares memory with whom, who needs a link.
//!
//! Two rounds of the rendezvous when everybody shares memory: one tells who is where, one which neighbours have
//! received each other's memory. A third tells addresses when links over TCP are needed.

use crate::{
    accept::{self, Caller, NAP},
    bell::Bell,
    error::{Error, Result},
    fork::Registered,
    frame::{Hello, Purpose},
    health::EXPLANATION,
    layout::Layout,
    link::pipe::PipeLink,
    mesh::{Peer, algorithms::peers_of},
    rendezvous::Rendezvous,
    security::Security,
    shm::{
        handover::{self, Channel, single},
        segment::Segment,
    },
    watch::{Near, Remote},
};
use rustix::{
    fd::{AsFd, AsRawFd, OwnedFd},
    thread::CpuSet,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    os::unix::{fs::MetadataExt, net::UnixListener},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long a neighbour may take over one message of the handover.
const HANDOVER: Duration = Duration::from_secs(5);

/// What every rank tells the others about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub host: String,
    /// Boot id and network namespace: equal for ranks that can reach each other's Unix sockets.
    pub place: String,
    /// The Unix socket at which its memory is handed over.
    pub socket: String,
    /// What a caller has to know to be let in.
    pub token: [u8; 16],
    pub certificate: Vec<u8>,
    /// The cores it may run on, a bit each.
    pub cores: Vec<u8>,
    /// How many of them it may keep busy at once.
    pub quota: u32,
    /// Treat all ranks alike, wherever they are.
    pub flat: bool,
}

impl Member {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.token);
        bytes.extend(self.quota.to_le_bytes());
        bytes.push(u8::from(self.flat));
        let texts = [&self.host, &self.place, &self.socket].map(String::as_bytes);
        for field in texts.into_iter().chain([&self.certificate[..], &self.cores]) {
            bytes.extend((field.len() as u16).to_le_bytes());
            bytes.extend(field);
        }
        bytes
    }

    /// What is needed of it once the group is made.
    fn without_cores(&self) -> Self {
        Self { cores: Vec::new(), ..self.clone() }
    }

    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (token, rest) = bytes.split_first_chunk::<16>()?;
        let (quota, rest) = rest.split_first_chunk::<4>()?;
        let (flat, mut rest) = rest.split_first()?;
        let mut field = || {
            let (length, after) = rest.split_first_chunk::<2>()?;
            let (field, after) =
                after.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
            rest = after;
            Some(field.to_vec())
        };
        let mut text = || String::from_utf8(field()?).ok();
        let (host, place, socket) = (text()?, text()?, text()?);
        let (certificate, cores) = (field()?, field()?);
        let quota = u32::from_le_bytes(*quota);
        let flat = match flat {
            0 => false,
            1 => true,
            _ => return None,
        };
        Some(Self { host, place, socket, token: *token, certificate, cores, quota, flat })
    }

    /// The machine it runs on, whatever its network namespace.
    fn machine(&self) -> &str {
        self.place.split('/').next().unwrap_or(&self.place)
    }
}

/// Everything a group is made of.
pub(crate) struct Connected {
    pub hosts: Vec<String>,
    /// The cores that the ranks of a machine may use together; of the machine with the fewest.
    pub cores: usize,
    /// Some machine has more ranks than cores.
    pub crowded: bool,
    pub neighbours: Vec<Option<Arc<Segment>>>,
    /// To every neighbour, for descriptors of later buckets.
    pub channels: Vec<Option<Channel>>,
    /// Every pair shares memory.
    pub shared: bool,
    /// Who is where, if hosts have several ranks and these are not to be treated alike.
    pub layout: Option<Layout>,
    pub peers: Vec<Option<Peer>>,
    pub near: Vec<Near>,
    pub remote: Vec<Remote>,
    pub directory: Directory,
}

/// What a rank needs to meet others later on: who they are, where they are, and where it can be called itself.
pub(crate) struct Directory {
    pub me: usize,
    pub generation: u64,
    pub members: Vec<Member>,
    pub security: Security,
    /// Who shares memory with this rank.
    pub neighbours: Vec<bool>,
    pub near: Listener<UnixListener>,
    /// With everybody's address, where links over TCP are needed.
    pub far: Option<(Listener<TcpListener>, Vec<SocketAddr>)>,
}

/// A listener that does not block and that forked children do not keep.
pub(crate) struct Listener<L> {
    _registered: Registered,
    pub socket: L,
}

impl<L: AsFd + AsRawFd> Listener<L> {
    fn new(socket: L) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self { _registered: Registered::new(&socket), socket })
    }
}

/// What a caller chooses.
pub(crate) struct Wishes<'a> {
    pub security: &'a Security,
    pub host: Option<String>,
    pub address: Option<IpAddr>,
    pub share_memory: bool,
    pub memory_domain: Option<String>,
    pub flat: bool,
    pub limit: Duration,
    /// Links between the lowest rank and every other, instead of those that collectives need.
    pub star: bool,
}

/// A neighbour whose memory has arrived.
struct Neighbour {
    rank: usize,
    segment: Arc<Segment>,
    channel: Channel,
}

/// Meets the others and connects. A rank that fails tells the others why, so that nobody waits for it.
pub(crate) fn connect(rendezvous: &dyn Rendezvous, wishes: &Wishes<'_>) -> Result<Connected> {
    try_connect(rendezvous, wishes).inspect_err(|error| rendezvous.abandon(&error.to_string()))
}

fn try_connect(rendezvous: &dyn Rendezvous, wishes: &Wishes<'_>) -> Result<Connected> {
    let (me, size) = (rendezvous.rank(), rendezvous.size());
    if me >= size {
        return Err(Error::Invalid(format!("there is no rank {me} among {size}")));
    }
    let deadline = Instant::now() + wishes.limit;
    let gather = |message: &[u8]| {
        rendezvous.all_gather(message, deadline.saturating_duration_since(Instant::now()))
    };
    let (own, listener) = introduce(wishes)?;
    let members: Vec<Member> = gather(&own.encode())?
        .iter()
        .enumerate()
        .map(|(rank, bytes)| Member::decode(bytes).ok_or(rank))
        .collect::<Result<_, _>>()
        .map_err(|rank| {
            let rank = rendezvous.name(rank);
            Error::Bootstrap(format!("rank {rank} introduced itself with garbage"))
        })?;
    let system = |error: rustix::io::Errno| Error::system("shared memory cannot be made", error);
    let (fd, segment) = Segment::create().map_err(system)?;
    let names = (0..size).map(|rank| rendezvous.name(rank)).collect();
    let generation = rendezvous.generation();
    let party = Party { me, generation, names, members: &members, segment: fd };

    // Higher ranks call lower ones. When all have told how their calls went, no more calls come.
    let closed = Bell::new().map_err(|error| Error::system("no bell", error))?;
    let (mut neighbours, gathered) = thread::scope(|scope| {
        let accepting = scope.spawn(|| party.accept(&listener, &closed));
        let mut neighbours = party.call();
        let reached: BTreeSet<usize> = neighbours.iter().map(|neighbour| neighbour.rank).collect();
        let message: Vec<u8> = (0..me).map(|rank| u8::from(reached.contains(&rank))).collect();
        let gathered = gather(&message);
        closed.ring();
        let accepted =
            accepting.join().map_err(|_| Error::Bootstrap("the handover panicked".into()));
        accepted
            .map(|accepted| neighbours.extend(accepted))
            .and(gathered.map(|all| (neighbours, all)))
    })?;
    // What the caller's side says counts: it was the last to confirm.
    let shares = |a: usize, b: usize| gathered[a.max(b)].get(a.min(b)) == Some(&1);
    neighbours.retain(|neighbour| shares(me, neighbour.rank));

    let shared = (0..size).all(|b| (0..b).all(|a| shares(a, b)));
    let directory = Directory {
        me,
        generation: rendezvous.generation(),
        members: members.iter().map(Member::without_cores).collect(),
        security: wishes.security.clone(),
        neighbours: (0..size).map(|rank| rank != me && shares(me, rank)).collect(),
        near: Listener::new(listener).map_err(|error| Error::system("a listener", error))?,
        far: None,
    };
    let (cores, crowded) = cores(&members);
    let flat = members.iter().any(|member| member.flat);
    let mut connected = Connected {
        hosts: members.iter().map(|member| member.host.clone()).collect(),
        cores,
        crowded,
        neighbours: (0..size).map(|_| None).collect(),
        channels: (0..size).map(|_| None).collect(),
        shared,
        layout: if flat { None } else { Layout::find(size, shares) },
        peers: (0..size).map(|_| None).collect(),
        near: Vec::new(),
        remote: Vec::new(),
        directory,
    };
    connected.neighbours[me] = Some(Arc::new(segment));
    for Neighbour { rank, segment, channel } in neighbours {
        let process = channel.process();
        let (beat, heard) = (segment.heartbeat(), Instant::now());
        connected.near.push(Near { rank, process, beat, heard });
        connected.neighbours[rank] = Some(segment);
        connected.channels[rank] = Some(channel);
    }
    if !shared || wishes.star {
        let peers = match (&connected.layout, wishes.star) {
            (_, true) if me == 0 => (1..size).collect(),
            (_, true) => BTreeSet::from([0]),
            // What has no hierarchical form treats all ranks alike.
            (Some(layout), _) => &layout.peers(me) | &peers_of(me, size),
            (None, _) => peers_of(me, size),
        };
        let (near, far): (Vec<usize>, Vec<usize>) =
            peers.iter().partition(|peer| shares(me, **peer));
        open_pipes(&mut connected, rendezvous, me, &near)?;
        let (address, listener) = listen(rendezvous, wishes)?;
        let addresses = addresses(&gather(address.to_string().as_bytes())?)?;
        let meeting = Meeting { rendezvous, wishes, addresses, listener, deadline };
        open_connections(&mut connected, &party, &meeting, &far)?;
        let Meeting { addresses, listener, .. } = meeting;
        let listener =
            Listener::new(listener).map_err(|error| Error::system("a listener", error))?;
        connected.directory.far = Some((listener, addresses));
        // Whoever could not connect has said so by now, and why.
        gather(&[])?;
    }
    Ok(connected)
}

/// Who this rank is, and the socket at which neighbours meet it.
fn introduce(wishes: &Wishes<'_>) -> Result<(Member, UnixListener)> {
    let mut random = [0u8; 32];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Error::system("no random numbers", error))?;
    let (token, name) = random.split_at(16);
    let name: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
    let socket = format!("deuteron-{name}");
    let listener = handover::listen(&socket)
        .map_err(|error| Error::system("cannot listen on an abstract Unix socket", error))?;
    let host = wishes
        .host
        .clone()
        .unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
    let mut place = if wishes.share_memory { place(&socket) } else { socket.clone() };
    place.extend(wishes.memory_domain.iter().map(|domain| format!("/{domain}")));
    let set = rustix::thread::sched_getaffinity(None).unwrap_or_default();
    let mut cores = vec![0; CpuSet::MAX_CPU / 8];
    for core in (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core)) {
        cores[core / 8] |= 1 << (core % 8);
    }
    let quota = thread::available_parallelism().map_or(1, usize::from) as u32;
    let certificate = wishes.security.certificate().to_vec();
    let token = token.try_into().unwrap_or_default();
    let flat = wishes.flat;
    Ok((Member { host, place, socket, token, certificate, cores, quota, flat }, listener))
}

/// How many cores the ranks of a machine have together, where that is least, and whether they are fewer than ranks
/// anywhere. Ranks that are bound to a core each have as many as there are ranks. A quota below what a rank is bound to
/// holds for all at its place, such as a container; places of one machine share its cores.
fn cores(members: &[Member]) -> (usize, bool) {
    let count = |cores: &[u8]| cores.iter().map(|byte| byte.count_ones() as usize).sum::<usize>();
    let together = |here: &[&Member]| {
        let mut union = vec![0; CpuSet::MAX_CPU / 8];
        for member in here {
            union.iter_mut().zip(&member.cores).for_each(|(all, own)| *all |= own);
        }
        count(&union)
    };
    let mut machines: BTreeMap<&str, BTreeMap<&str, Vec<&Member>>> = BTreeMap::new();
    for member in members {
        let places = machines.entry(member.machine()).or_default();
        places.entry(&member.place).or_default().push(member);
    }
    let (mut fewest, mut crowded) = (usize::MAX, false);
    for places in machines.values() {
        let mut allowed = 0;
        for here in places.values() {
            let limited = here.iter().map(|member| (member.quota as usize, count(&member.cores)));
            let quota =
                limited.filter(|(quota, bound)| quota < bound).map(|(quota, _)| quota).min();
            let cores = together(here).min(quota.unwrap_or(usize::MAX)).max(1);
            crowded |= here.len() > cores;
            allowed += cores;
        }
        let everybody: Vec<&Member> = places.values().flatten().copied().collect();
        let cores = together(&everybody).min(allowed).max(1);
        crowded |= everybody.len() > cores;
        fewest = fewest.min(cores);
    }
    (if members.is_empty() { 1 } else { fewest }, crowded)
}

/// Boot id and network namespace; something nobody else has where they cannot be read.
fn place(otherwise: &str) -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let namespace = fs::metadata("/proc/self/ns/net");
    match (boot, namespace) {
        (Ok(boot), Ok(namespace)) => format!("{}/{}", boot.trim(), namespace.ino()),
        _ => otherwise.to_owned(),
    }
}

/// What `me` says first when it calls `to`.
pub(crate) fn hello(
    members: &[Member],
    generation: u64,
    me: usize,
    to: usize,
    purpose: Purpose,
) -> Hello {
    Hello { generation, from: me as u32, to: to as u32, purpose, token: members[to].token }
}

/// Whether a greeting comes from a member of the group, for one of the purposes, and from which.
pub(crate) fn admit(
    members: &[Member],
    generation: u64,
    me: usize,
    hello: &Hello,
    purposes: &[Purpose],
) -> Result<usize, String> {
    accept::for_me(hello, me, generation)?;
    let from = hello.from as usize;
    let differs = hello.token.iter().zip(&members[me].token).fold(0, |all, (a, b)| all | (a ^ b));
    if differs != 0 || from >= members.len() || !purposes.contains(&hello.purpose) {
        return Err("you are not of this group".into());
    }
    Ok(from)
}

/// This rank among the others while memory is handed over.
struct Party<'a> {
    me: usize,
    generation: u64,
    /// As [`Rendezvous::name`].
    names: Vec<usize>,
    members: &'a [Member],
    segment: OwnedFd,
}

impl Party<'_> {
    fn is_neighbour(&self, rank: usize) -> bool {
        rank != self.me && self.members[rank].place == self.members[self.me].place
    }

    fn hello(&self, to: usize, purpose: Purpose) -> Hello {
        hello(self.members, self.generation, self.me, to, purpose)
    }

    fn admit(&self, hello: &Hello, purposes: &[Purpose]) -> Result<usize, String> {
        admit(self.members, self.generation, self.me, hello, purposes)
    }

    /// Calls the neighbours of lower rank. One that cannot be shared with is left out, with the reason logged.
    fn call(&self) -> Vec<Neighbour> {
        let lower = (0..self.me).filter(|rank| self.is_neighbour(*rank));
        lower
            .filter_map(|rank| {
                self.exchange_as_caller(rank)
                    .inspect_err(|error| {
                        tracing::warn!(
                            "rank {} shares no memory with rank {} on the same host and uses TCP: {error}",
                            self.names[self.me],
                            self.names[rank]
                        );
                    })
                    .ok()
            })
            .collect()
    }

    fn exchange_as_caller(&self, rank: usize) -> Result<Neighbour> {
        let failed = |error| Error::system("the handover failed", error);
        let channel = Channel::connect(&self.members[rank].socket).map_err(failed)?;
        let hello = self.hello(rank, Purpose::Memory).encode();
        channel.send(&[hello.len() as u8], &[]).map_err(failed)?;
        channel.send(&hello, &[self.segment.as_fd()]).map_err(failed)?;
        let theirs = single(channel.receive_within(&mut [0], HANDOVER).map_err(failed)?)?;
        let segment = Segment::of_neighbour(&theirs).map_err(|error| failed(error.into()))?;
        channel.send(&[1], &[]).map_err(failed)?;
        Ok(Neighbour { rank, segment: Arc::new(segment), channel })
    }

    /// Answers neighbours of higher rank until no more can come.
    fn accept(&self, listener: &UnixListener, closed: &Bell) -> Vec<Neighbour> {
        let mut neighbours: Vec<Neighbour> = Vec::new();
        if listener.set_nonblocking(true).is_err() {
            return neighbours;
        }
        let mut last = false;
        loop {
            last |= closed.silence();
            match listener.accept() {
                Ok((stream, _)) => match Channel::checked(stream)
                    .map_err(|error| Error::system("wrong credentials", error))
                    .and_then(|channel| self.exchange_as_called(channel))
                {
                    Ok(neighbour) => neighbours.push(neighbour),
                    Err(error) => tracing::warn!("refused a handover of memory: {error}"),
                },
                Err(_) if last => return neighbours,
                Err(_) => closed.wait(listener, NAP),
            }
        }
    }

    fn exchange_as_called(&self, channel: Channel) -> Result<Neighbour> {
        let failed = |error| Error::system("the handover failed", error);
        let refused = |why: String| Error::Bootstrap(why);
        let mut length = [0];
        channel.receive_within(&mut length, HANDOVER).map_err(failed)?;
        let mut bytes = [0; Hello::MAX_BYTES];
        let bytes = bytes
            .get_mut(..usize::from(length[0]))
            .ok_or_else(|| refused("its greeting is too long".into()))?;
        let theirs = channel.receive_within(bytes, HANDOVER).map_err(failed)?;
        let rank = match Hello::decode(bytes) {
            Ok(Some((hello, _))) => self.admit(&hello, &[Purpose::Memory]).map_err(refused)?,
            Ok(None) => return Err(refused("its greeting is cut off".into())),
            Err(error) => return Err(refused(error.to_string())),
        };
        let segment =
            Segment::of_neighbour(&single(theirs)?).map_err(|error| failed(error.into()))?;
        channel.send(&[1], &[self.segment.as_fd()]).map_err(failed)?;
        channel.receive_within(&mut [0], HANDOVER).map_err(failed)?;
        Ok(Neighbour { rank, segment: Arc::new(segment), channel })
    }
}

/// Links to neighbours in a group that also has others: the lower rank makes the pipe.
fn open_pipes(
    connected: &mut Connected,
    rendezvous: &dyn Rendezvous,
    me: usize,
    near: &[usize],
) -> Result<()> {
    let failed = |error: io::Error| Error::system("a pipe to a neighbour cannot be made", error);
    // What goes wrong with the neighbour, it knows better.
    let lost = |error: io::Error| explained(rendezvous, failed(error));
    let channel = |rank: usize| {
        connected.channels[rank]
            .as_ref()
            .ok_or_else(|| Error::Bootstrap("a neighbour is missing".into()))
    };
    let mut links = Vec::new();
    for rank in near.iter().filter(|rank| **rank > me) {
        let (link, descriptors) = PipeLink::create().map_err(failed)?;
        let [memory, doorbell] = descriptors.each_ref().map(AsFd::as_fd);
        channel(*rank)?.send(&[2], &[memory, doorbell]).map_err(lost)?;
        links.push((*rank, link));
    }
    for rank in near.iter().filter(|rank| **rank < me) {
        let descriptors = channel(*rank)?.receive_within(&mut [0], HANDOVER).map_err(lost)?;
        let descriptors = <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| {
            Error::Bootstrap("a neighbour sent the wrong number of descriptors".into())
        })?;
        links.push((*rank, PipeLink::open(descriptors).map_err(failed)?));
    }
    for (rank, link) in links {
        connected.peers[rank] = Some(Peer::new(Box::new(link)));
    }
    Ok(())
}

fn listen(rendezvous: &dyn Rendezvous, wishes: &Wishes<'_>) -> Result<(SocketAddr, TcpListener)> {
    let ip = wishes.address.or_else(|| rendezvous.address()).unwrap_or(Ipv4Addr::LOCALHOST.into());
    wishes.security.admits(ip)?;
    let failed = |error| Error::system(format!("cannot listen on {ip}"), error);
    let listener = TcpListener::bind((ip, 0)).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((address, listener))
}

fn addresses(messages: &[Vec<u8>]) -> Result<Vec<SocketAddr>> {
    messages
        .iter()
        .enumerate()
        .map(|(rank, bytes)| {
            let parsed = std::str::from_utf8(bytes).ok().and_then(|text| text.parse().ok());
            parsed.ok_or_else(|| Error::Bootstrap(format!("rank {rank} has no address")))
        })
        .collect()
}

/// Where and until when far peers meet.
struct Meeting<'a> {
    rendezvous: &'a dyn Rendezvous,
    wishes: &'a Wishes<'a>,
    addresses: Vec<SocketAddr>,
    listener: TcpListener,
    deadline: Instant,
}

/// A data and a control connection to each far peer; higher ranks call lower ones.
fn open_connections(
    connected: &mut Connected,
    party: &Party<'_>,
    meeting: &Meeting<'_>,
    far: &[usize],
) -> Result<()> {
    let Meeting { wishes, addresses, deadline, .. } = meeting;
    const PURPOSES: [Purpose; 2] = [Purpose::Data, Purpose::Control];
    if !far.is_empty() && matches!(wishes.security, Security::Plain) {
        let me = party.names[party.me];
        tracing::warn!("rank {me} talks to other hosts in clear text, as configured");
    }
    let each = |rank: usize| PURPOSES.map(|purpose| (rank, purpose));
    let expected =
        far.iter().filter(|rank| **rank > party.me).flat_map(|rank| each(*rank)).collect();
    let admit = |hello: &Hello, certificate: &[u8]| {
        let from = party.admit(hello, &PURPOSES)?;
        if certificate != party.members[from].certificate {
            return Err(format!(
                "your certificate is not the one that rank {from} has told its group"
            ));
        }
        Ok(())
    };
    let abandoned = AtomicBool::new(false);
    let call_all = || {
        let mut callers = Vec::new();
        for (rank, purpose) in
            far.iter().filter(|rank| **rank < party.me).flat_map(|rank| each(*rank))
        {
            wishes.security.admits(addresses[rank].ip())?;
            let hello = party.hello(rank, purpose);
            let stream = accept::call(addresses[rank], wishes.security, &hello, *deadline, false)
                .map_err(|error| {
                let host = &party.members[rank].host;
                Error::system(
                    format!(
                        "rank {} cannot reach rank {} on {host}",
                        party.names[party.me], party.names[rank]
                    ),
                    error,
                )
            })?;
            if stream.certificate() != party.members[rank].certificate {
                return Err(Error::Bootstrap(format!(
                    "who answers at {} does not have the certificate of rank {}",
                    addresses[rank], party.names[rank]
                )));
            }
            callers.push(Caller { rank, purpose, stream });
        }
        Ok(callers)
    };
    let (called, accepted) = thread::scope(|scope| {
        let calling = scope.spawn(|| {
            let called = call_all();
            abandoned.store(called.is_err(), Ordering::Relaxed);
            called
        });
        let go_on = || match abandoned.load(Ordering::Relaxed) {
            true => Err(Error::Bootstrap("another rank could not be called".into())),
            false => meeting.rendezvous.check(),
        };
        let accepted = accept::all(
            &meeting.listener,
            wishes.security,
            expected,
            *deadline,
            go_on,
            admit,
            |rank| party.names[rank],
        );
        let called = calling.join().map_err(|_| Error::Bootstrap("a call panicked".into()));
        (called, accepted)
    });
    let callers = match (called?, accepted) {
        (Ok(called), Ok(accepted)) => called.into_iter().chain(accepted),
        (Err(error), _) | (_, Err(error)) => return Err(explained(meeting.rendezvous, error)),
    };
    let mut links = BTreeMap::new();
    for Caller { rank, purpose, stream } in callers {
        let failed = |error| Error::system(format!("the connection to rank {rank}"), error);
        links.insert((rank, purpose), stream.into_link().map_err(failed)?);
    }
    for ((rank, purpose), link) in links {
        match purpose {
            Purpose::Control => connected.remote.push(Remote::new(rank, link)),
            _ => connected.peers[rank] = Some(Peer::new(link)),
        }
    }
    Ok(())
}

/// A better reason than a broken connection, if the rendezvous learns one within a moment.
fn explained(rendezvous: &dyn Rendezvous, error: Error) -> Error {
    let start = Instant::now();
    while start.elapsed() < EXPLANATION {
        if let Err(better) = rendezvous.check() {
            return better;
        }
        thread::sleep(Duration::from_millis(2));
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_survive_the_rendezvous() {
        let member = Member {
            host: "node-1".into(),
            place: "boot/4026".into(),
            socket: "deuteron-00".into(),
            token: [7; 16],
            certificate: vec![1, 2, 3],
            cores: vec![0b11],
            quota: 16,
            flat: false,
        };
        assert_eq!(Member::decode(&member.encode()), Some(member.clone()));
        assert_eq!(Member::decode(&member.encode()[..30]), None);
    }

    #[test]
    fn cores_are_counted_by_machine() {
        let member = |place: &str, cores: u8, quota| Member {
            host: "node-1".into(),
            place: place.into(),
            socket: "deuteron-00".into(),
            token: [7; 16],
            certificate: Vec::new(),
            cores: vec![cores],
            quota,
            flat: false,
        };
        let (one, other) = (member("boot/4026", 0b11, 16), member("boot/4026", 0b110, 16));
        assert_eq!(cores(&[one.clone(), other.clone()]), (3, false));
        let throttled = member("boot/4026", 0b11, 1);
        assert_eq!(cores(&[throttled, other.clone()]), (1, true));
        let elsewhere = member("reboot/1", 1, 16);
        assert_eq!(cores(&[one.clone(), other.clone(), elsewhere]), (1, false));
        // Another network namespace is not another machine.
        let beside = member("boot/1", 0b11, 16);
        assert_eq!(cores(&[one.clone(), one.clone(), beside.clone()]), (2, true));
        assert_eq!(cores(&[one, other, beside]), (3, false));
        // Containers have their own quotas, and the machine's cores between them.
        let contained = |place: &str| member(place, 0xff, 2);
        let [a, b] = [contained("boot/1"), contained("boot/2")];
        assert_eq!(cores(&[a.clone(), a.clone(), b.clone(), b.clone()]), (4, false));
        assert_eq!(cores(&[a.clone(), a.clone(), a, b]), (4, true));
    }
}
