//! What the tests of this crate share: a time limit that kills, tasks that are not processes, and a log to look at.

use crate::{
    Ending, Result,
    agent::Starter,
    process::{Handle, Started},
    protocol::Hand,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::{
    fmt::{Debug, Write},
    net::Ipv4Addr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::Duration,
};
use tokio::sync::watch;
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

/// Aborts the whole test process when a test takes longer than `seconds`: nothing may hang.
pub(crate) struct Limit(
    #[expect(dead_code, reason = "dropping it ends the limit")] mpsc::Sender<()>,
);

impl Limit {
    #[expect(clippy::print_stderr, reason = "the last thing that this process can say")]
    #[expect(clippy::disallowed_methods, reason = "a test that hangs cannot return an error")]
    pub fn seconds(seconds: u64) -> Self {
        let name = thread::current().name().unwrap_or("a test").to_owned();
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            if receiver.recv_timeout(Duration::from_secs(seconds))
                == Err(mpsc::RecvTimeoutError::Timeout)
            {
                eprintln!("{name} did not end within {seconds} s");
                std::process::abort();
            }
        });
        Self(sender)
    }
}

/// What an agent with so many slots says that it has.
pub(crate) fn hand(host: &str, slots: u32) -> Hand {
    Hand {
        host: host.to_owned(),
        slots,
        cores: 1,
        address: Ipv4Addr::LOCALHOST.into(),
        accelerators: Vec::new(),
        problems: Vec::new(),
    }
}

/// Tasks of one agent that run until somebody ends them. Clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Tasks(Arc<Mutex<Vec<watch::Sender<Option<Ending>>>>>);

impl Tasks {
    fn all(&self) -> MutexGuard<'_, Vec<watch::Sender<Option<Ending>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many have been started.
    pub fn started(&self) -> usize {
        self.all().len()
    }

    /// How many are running.
    pub fn running(&self) -> usize {
        self.all().iter().filter(|task| task.borrow().is_none()).count()
    }

    /// Ends those that run.
    pub fn end(&self, ending: &Ending) {
        self.all().iter().for_each(|task| finish(task, ending.clone()));
    }

    /// Starts them; they end at once when they are asked to.
    pub fn starter(&self) -> Starter {
        let tasks = self.clone();
        Box::new(move |_| {
            let (sender, mut receiver) = watch::channel(None);
            tasks.all().push(sender.clone());
            let ending = async move {
                let ending = receiver.wait_for(Option::is_some).await;
                ending.ok().and_then(|ending| ending.clone()).unwrap_or(Ending::Failed)
            };
            let handle = Box::new(Pretended(sender));
            Result::Ok(Started { handle, outputs: Vec::new(), ending: Box::pin(ending) })
        })
    }
}

fn finish(task: &watch::Sender<Option<Ending>>, ending: Ending) {
    task.send_if_modified(|now| {
        let runs = now.is_none();
        now.get_or_insert(ending);
        runs
    });
}

/// The only way to a task that is no process.
struct Pretended(watch::Sender<Option<Ending>>);

impl Handle for Pretended {
    fn terminate(&self) {
        finish(&self.0, Ending::Signalled(15));
    }

    fn kill(&self) {
        finish(&self.0, Ending::Signalled(9));
    }

    fn pause(&self) {}

    fn resume(&self) {}

    fn is_stopped(&self) -> bool {
        false
    }
}

impl Drop for Pretended {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Keeps what this crate logs on the threads that use it. Clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    /// How many lines contain a text.
    pub fn count(&self, text: &str) -> usize {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().filter(|line| line.contains(text)).count()
    }

    /// All of them.
    pub fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("deuteron")
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, _: &Field, value: &dyn Debug) {
                let _ = write!(self.0, " {value:?}");
            }
        }
        let mut text = Text(event.metadata().level().to_string());
        event.record(&mut text);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(text.0);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// As many descriptors as this process may have.
pub(crate) fn raise_descriptors() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(1 << 20);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: limit.maximum });
    most
}
