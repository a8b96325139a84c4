//! Numbered items, dealt to threads, and what the threads make of them, in the order of the items.
//!
//! Each thread has a queue of its own with few places: whoever is ahead waits. Since items are dealt in turn, the next
//! one in order is always with a thread that can go on.

use crate::{Error, Result};
use std::{
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    thread::Builder,
    time::{Duration, Instant},
};

/// A part of what was made from an item, and whether it was the last.
type Part<T> = (T, bool);

/// Where a thread puts what it makes.
pub(crate) struct Sink<T>(SyncSender<Result<Part<T>>>);

impl<T> Sink<T> {
    /// Whether anybody still wants more.
    pub(crate) fn put(&self, part: T, last: bool) -> bool {
        self.0.send(Ok((part, last))).is_ok()
    }
}

/// What a thread does with an item; whether it goes on.
pub(crate) type Work<T> = Box<dyn FnMut(u64, &Sink<T>) -> Result<bool> + Send>;

/// Parts in the order of their items.
pub(crate) struct Dealt<T> {
    queues: Vec<Receiver<Result<Part<T>>>>,
    next: u64,
    items: u64,
}

/// Deals `items` to as many threads as there is work, each of which is at most `ahead` parts ahead.
pub(crate) fn deal<T: Send + 'static>(
    name: &str,
    items: u64,
    ahead: usize,
    work: Vec<Work<T>>,
) -> Result<Dealt<T>> {
    let threads = work.len();
    let mut queues = Vec::with_capacity(threads);
    for (index, mut work) in work.into_iter().enumerate() {
        let (sender, receiver) = sync_channel(ahead);
        queues.push(receiver);
        let run = move || {
            let sink = Sink(sender);
            for item in (index as u64..items).step_by(threads) {
                match work(item, &sink) {
                    Ok(true) => {}
                    Ok(false) => return,
                    Err(error) => {
                        // Nobody waits for it any more if it cannot be said.
                        let _ = sink.0.send(Err(error));
                        return;
                    }
                }
            }
        };
        let started = Builder::new().name(format!("dt-{name}-{index}")).spawn(run);
        started.map_err(|error| Error::system("cannot start a thread", error))?;
    }
    Ok(Dealt { queues, next: 0, items })
}

impl<T> Dealt<T> {
    /// The next part, `None` after the last. After an error there is nothing more.
    pub(crate) fn next(&mut self) -> Option<Result<T>> {
        loop {
            if let Some(next) = self.next_until(Instant::now() + Duration::from_secs(60)) {
                return next;
            }
        }
    }

    /// The same, or `None` if there is none yet.
    pub(crate) fn next_until(&mut self, end: Instant) -> Option<Option<Result<T>>> {
        if self.next >= self.items || self.queues.is_empty() {
            return Some(None);
        }
        let queue = &self.queues[(self.next % self.queues.len() as u64) as usize];
        let got = match queue.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(got) => got,
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => {
                Err(Error::Internal("a thread that reads data ended too early"))
            }
        };
        match got {
            Ok((part, last)) => {
                self.next += u64::from(last);
                Some(Some(Ok(part)))
            }
            Err(error) => {
                self.next = self.items;
                Some(Some(Err(error)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_in_order_and_errors_end_them() {
        let work = |fail: u64| -> Work<(u64, u64)> {
            Box::new(move |item, sink| {
                if item == fail {
                    return Err(Error::Invalid("no".into()));
                }
                Ok((0..3).all(|part| sink.put((item, part), part == 2)))
            })
        };
        let all = |threads, fail| {
            let mut dealt = deal("test", 7, 1, (0..threads).map(|_| work(fail)).collect()).unwrap();
            std::iter::from_fn(move || dealt.next()).map(Result::ok).collect::<Vec<_>>()
        };
        let whole: Vec<_> =
            (0..7).flat_map(|item| (0..3).map(move |part| Some((item, part)))).collect();
        for threads in 1..5 {
            assert_eq!(all(threads, u64::MAX), whole);
            assert_eq!(all(threads, 4), [&whole[..12], &[None]].concat());
        }
    }
}
