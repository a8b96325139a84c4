//! What the tests of this crate share: a time limit that kills, tasks that are not processes, and a log to look at.

use crate::{
    Ending, Result, Stream,
    agent::Starter,
    net::Bound,
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
use tokio::{io::AsyncWriteExt, sync::watch};
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
        machine: String::new(),
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

    /// Ends the one that was started first, if it runs.
    pub fn end_first(&self, ending: &Ending) {
        self.all().iter().take(1).for_each(|task| finish(task, ending.clone()));
    }

    /// Starts them; each writes a line whenever some time has passed.
    pub fn talking_starter(
        &self,
        every: Duration,
        line: impl Fn() -> String + Clone + Send + 'static,
    ) -> Starter {
        let start = self.starter();
        Box::new(move |program| {
            let Started { handle, ending, .. } = start(program)?;
            let (mut near, far) = tokio::io::duplex(1024);
            let line = line.clone();
            let talk = Bound::spawn(async move {
                let mut ticks = tokio::time::interval(every);
                loop {
                    ticks.tick().await;
                    if near.write_all(line().as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
            let ending = Box::pin(async move {
                let ending = ending.await;
                drop(talk);
                ending
            });
            Ok(Started { handle, outputs: vec![(Stream::Stdout, Box::new(far))], ending })
        })
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
    /// How many lines there are.
    pub fn count(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
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
