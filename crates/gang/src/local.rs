//! A gang of threads: closures of this process, with the same words as processes on many hosts.

use crate::{
    Ending, Error, Request, Result, Task, TaskInfo,
    discovery::{Source, discover},
    placement::{Offer, place},
};
use deuteron_collective::LocalRendezvous;
use std::{
    any::Any,
    net::Ipv4Addr,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError},
    thread,
};

/// Tasks that are to run together.
pub struct Gang {
    tasks: usize,
    request: Option<Request>,
    discovery: Vec<Source>,
}

impl Gang {
    /// As many tasks as given, each a thread of this process.
    pub fn local(tasks: usize) -> Self {
        Self { tasks, request: None, discovery: vec![Source::Nvml] }
    }

    /// Gives each task accelerators of its own.
    pub fn accelerated(mut self, request: Request) -> Self {
        self.request = Some(request);
        self
    }

    /// Where accelerators are looked for, instead of NVML.
    pub fn discovery(mut self, sources: Vec<Source>) -> Self {
        self.discovery = sources;
        self
    }

    /// Runs the closure once per task, all at the same time, and returns the results in rank order.
    ///
    /// The first task that returns an error or panics fails the gang: the others find out where they next wait for it.
    ///
    /// ```
    /// use deuteron_collective::{GroupOptions, ReduceOp};
    /// use deuteron_gang::Gang;
    /// let sums = Gang::local(4).run(|task| {
    ///     let group = task.group(GroupOptions::default())?;
    ///     let mut number = [task.rank() as f32];
    ///     group.all_reduce(&mut number, ReduceOp::Sum)?;
    ///     Ok(number[0])
    /// })?;
    /// assert_eq!(sums, [6.0; 4]);
    /// # Ok::<(), deuteron_gang::Error>(())
    /// ```
    pub fn run<T: Send>(&self, body: impl Fn(&Task) -> Result<T> + Sync) -> Result<Vec<T>> {
        let infos = Arc::new(self.infos()?);
        let failures: Mutex<Vec<Failure>> = Mutex::default();
        let host = infos[0].host.clone();
        let work = |rendezvous: LocalRendezvous| {
            let task = Task::of_thread(Arc::clone(&infos), rendezvous);
            let rank = task.rank();
            let (last, follows) = match catch_unwind(AssertUnwindSafe(|| body(&task))) {
                Ok(Ok(value)) => return Some(value),
                Ok(Err(error)) => (error.to_string(), error.may_follow()),
                Err(panic) => (format!("it panicked: {}", message(&*panic)), false),
            };
            let failure = Failure { rank, last, follows };
            failures.lock().unwrap_or_else(PoisonError::into_inner).push(failure);
            None
        };
        let results: Vec<Option<T>> = thread::scope(|scope| {
            let start = |rendezvous: LocalRendezvous| {
                let name = format!("rank {}", deuteron_collective::Rendezvous::rank(&rendezvous));
                let work = &work;
                thread::Builder::new().name(name).spawn_scoped(scope, move || work(rendezvous))
            };
            // If one thread cannot be started its rendezvous is dropped, which ends the others.
            let threads: Vec<_> =
                LocalRendezvous::group(self.tasks).into_iter().map(start).collect();
            threads.into_iter().map(|thread| thread.ok()?.join().ok()?).collect()
        });
        let failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
        // A rank that unwinds leaves its groups before it can tell, so the others may be quicker.
        if let Some(first) = failures.into_iter().min_by_key(|failure| failure.follows) {
            let Failure { rank, last, .. } = first;
            return Err(Error::TaskFailed {
                rank,
                host,
                generation: 0,
                ending: Ending::Failed,
                last,
            });
        }
        let all: Option<Vec<T>> = results.into_iter().collect();
        all.ok_or_else(|| Error::Invalid("not every task could be given a thread".into()))
    }

    pub(crate) fn infos(&self) -> Result<Vec<TaskInfo>> {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let accelerators = match &self.request {
            Some(_) => discover(&self.discovery).accelerators,
            None => Vec::new(),
        };
        let offers = [Offer { host: host.clone(), slots: self.tasks as u32, accelerators }];
        let placement =
            place(&offers, self.tasks, self.request.as_ref()).map_err(Error::NotPlaced)?;
        placement.notes.iter().for_each(|note| tracing::info!("{note}"));
        let info = |seat: crate::placement::Seat| TaskInfo {
            rank: seat.rank,
            local_rank: seat.local_rank,
            local_size: seat.local_size,
            cross_rank: seat.cross_rank,
            cross_size: seat.cross_size,
            host: host.clone(),
            address: Ipv4Addr::LOCALHOST.into(),
            accelerators: seat.accelerators,
        };
        Ok(placement.seats.into_iter().map(info).collect())
    }
}

/// How one task failed.
struct Failure {
    rank: usize,
    last: String,
    /// It may be because another failed.
    follows: bool,
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use deuteron_collective::{GroupOptions, ReduceOp};

    #[test]
    fn results_come_in_rank_order() {
        let ranks = Gang::local(5).run(|task| {
            task.barrier(None)?;
            Ok(task.rank())
        });
        assert_eq!(ranks.unwrap(), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_panic_is_that_tasks_failure_and_the_others_learn_of_it() {
        let outcome = Gang::local(3).run(|task| {
            let group = task.group(GroupOptions::default())?;
            if task.rank() == 1 {
                panic!("no more data");
            }
            loop {
                group.all_reduce(&mut [1.0f32], ReduceOp::Sum)?;
            }
            #[expect(unreachable_code, reason = "the loop needs a type")]
            Ok(())
        });
        let error = outcome.unwrap_err().to_string();
        assert!(error.starts_with("rank 1 on ") && error.contains("no more data"), "{error}");
    }

    #[test]
    fn an_error_before_a_barrier_ends_the_barrier() {
        let outcome = Gang::local(3).run(|task| {
            if task.rank() == 2 {
                return Err(Error::Invalid("a bad file".into()));
            }
            task.barrier(None)
        });
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("rank 2") && error.contains("a bad file"), "{error}");
    }
}
