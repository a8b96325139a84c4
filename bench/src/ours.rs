//! Our side: all-reduce on a registered bucket or on a plain slice.

use std::net::SocketAddr;
use std::ops::{DerefMut, Range};
use std::path::Path;
use std::time::Duration;

use deuteron_collective::{Group, GroupOptions, ReduceOp, Security, TcpRendezvous};

use crate::identity;
use crate::measure::{Block, Contestant, Failure, Job, Mode, Number, measure};

// Ranks start together; a machine with less than one core a rank may take a while.
const START: Duration = Duration::from_secs(30);

/// Connects the group and measures every block.
pub fn run(job: &Job, tls: Option<&Path>, registered: bool, flat: bool) -> Result<(), Failure> {
    let [group] = connect(job, tls, flat)?;
    job.run(&mut Ours { group, registered })
}

/// As many groups of the same ranks as are wanted.
pub fn connect<const GROUPS: usize>(
    job: &Job,
    tls: Option<&Path>,
    flat: bool,
) -> Result<[Group; GROUPS], Failure> {
    let address: SocketAddr = job.meeting.parse()?;
    let security = match tls {
        Some(directory) => Security::Tls(identity::ours(directory)?),
        None if address.ip().is_loopback() => Security::Local,
        None => Security::Plain,
    };
    let rendezvous = TcpRendezvous::connect(address, job.rank, job.ranks, 0, &security, START)?;
    let options = GroupOptions::default().security(security).flat(flat);
    let groups: Vec<Group> = (0..GROUPS)
        .map(|_| Group::connect(&rendezvous, options.clone()))
        .collect::<Result<_, _>>()?;
    groups.try_into().map_err(|_| "a group is missing".into())
}

struct Ours {
    group: Group,
    registered: bool,
}

impl Mode for Ours {
    fn measure<T: Number>(&mut self, job: &Job, block: &Block) -> Result<Vec<u64>, Failure> {
        let (group, count) = (&self.group, block.count::<T>());
        if self.registered {
            let buffer = group.bucket::<T>(count)?;
            measure(job, block, &mut AllReduce { group, buffer })
        } else {
            let buffer = vec![T::ZERO; count];
            measure(job, block, &mut AllReduce { group, buffer })
        }
    }
}

struct AllReduce<'a, B> {
    group: &'a Group,
    buffer: B,
}

impl<T: Number, B: DerefMut<Target = [T]>> Contestant<T> for AllReduce<'_, B> {
    fn input(&mut self) -> &mut [T] {
        &mut self.buffer
    }
    fn output(&self) -> &[T] {
        &self.buffer
    }
    fn summed(&self) -> Range<usize> {
        0..self.group.size()
    }
    fn barrier(&mut self) -> Result<(), Failure> {
        Ok(self.group.barrier()?)
    }
    fn call(&mut self) -> Result<(), Failure> {
        Ok(self.group.all_reduce(&mut self.buffer, ReduceOp::Sum)?)
    }
}
