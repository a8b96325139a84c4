//! Ranks as threads over each transport, under a time limit that kills.
#![allow(dead_code, unused_imports, unused_macros, reason = "each test file uses a part")]
#![allow(clippy::allow_attributes, reason = "whether anything is unused differs from file to file")]

pub mod reference;

use deuteron_collective::{
    Error, Group, GroupOptions, Identity, LocalRendezvous, SERVER_NAME, Security,
};
use std::{sync::mpsc, thread, time::Duration};

/// How the ranks of a test reach each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Over {
    SharedMemory,
    Tcp,
    Tls,
    /// Every third rank shares no memory, and all are treated alike: pipes among the others, TCP to and from it.
    Mixed,
    /// Hosts of two ranks each (the last has one if there is an odd number): shared memory inside, TLS between.
    Hosts,
    /// Hosts of one to three ranks, numbered across: shared memory inside, TCP between.
    Unequal,
}

impl Over {
    pub const ALL: [Self; 6] =
        [Self::SharedMemory, Self::Tcp, Self::Tls, Self::Mixed, Self::Hosts, Self::Unequal];

    pub fn options(self, rank: usize) -> GroupOptions {
        let options = GroupOptions::default().limit(Duration::from_secs(60));
        match self {
            Self::SharedMemory => options,
            Self::Tcp => options.share_memory(false),
            Self::Tls => options.share_memory(false).security(Security::Tls(job().member())),
            Self::Mixed => options.share_memory(rank % 3 != 1).flat(true),
            Self::Hosts => options
                .memory_domain(format!("host {}", rank / 2))
                .security(Security::Tls(job().member())),
            Self::Unequal => {
                let host = [0, 1, 0, 2, 0, 1, 1, 2][rank % 8];
                options.memory_domain(format!("host {host}"))
            }
        }
    }
}

/// A job's certificate authority.
pub struct Job {
    authority: rcgen::CertifiedIssuer<'static, rcgen::KeyPair>,
}

/// The authority that the ranks of this test process share.
pub fn job() -> &'static Job {
    static JOB: std::sync::OnceLock<Job> = std::sync::OnceLock::new();
    JOB.get_or_init(Job::new)
}

impl Job {
    pub fn new() -> Self {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        Self { authority: rcgen::CertifiedIssuer::self_signed(params, key).unwrap() }
    }

    pub fn member(&self) -> Identity {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec![SERVER_NAME.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.authority).unwrap();
        Identity::from_pem(
            self.authority.pem().as_bytes(),
            certificate.pem().as_bytes(),
            key.serialize_pem().as_bytes(),
        )
        .unwrap()
    }
}

/// Aborts the whole test process when a test takes longer than `seconds`: nothing may hang.
pub struct Limit(#[expect(dead_code, reason = "dropping it ends the limit")] mpsc::Sender<()>);

#[expect(clippy::print_stderr, reason = "the last thing that this process can say")]
#[expect(clippy::disallowed_methods, reason = "a test that hangs cannot return an error")]
impl Limit {
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

/// Runs `body` on every rank, each a thread of its own, and returns the results in rank order.
pub fn run<R: Send>(
    over: Over,
    ranks: usize,
    body: impl Fn(Group) -> Result<R, Error> + Sync,
) -> Vec<Result<R, Error>> {
    run_with(over, ranks, |options| options, body)
}

/// The same with other options.
pub fn run_with<R: Send>(
    over: Over,
    ranks: usize,
    options: impl Fn(GroupOptions) -> GroupOptions + Sync,
    body: impl Fn(Group) -> Result<R, Error> + Sync,
) -> Vec<Result<R, Error>> {
    let _limit = Limit::seconds(120);
    thread::scope(|scope| {
        let threads: Vec<_> = LocalRendezvous::group(ranks)
            .into_iter()
            .enumerate()
            .map(|(rank, rendezvous)| {
                let (body, options) = (&body, &options);
                scope.spawn(move || {
                    Group::connect(&rendezvous, options(over.options(rank))).and_then(body)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The results of ranks that all succeed.
pub fn all<R>(results: Vec<Result<R, Error>>) -> Vec<R> {
    let failed: Vec<String> = results
        .iter()
        .enumerate()
        .filter_map(|(rank, result)| Some(format!("rank {rank}: {}", result.as_ref().err()?)))
        .collect();
    assert!(failed.is_empty(), "{failed:#?}");
    results.into_iter().flatten().collect()
}
